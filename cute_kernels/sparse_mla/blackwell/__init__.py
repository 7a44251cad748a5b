"""Attention kernels with tcgen05, one file each."""
