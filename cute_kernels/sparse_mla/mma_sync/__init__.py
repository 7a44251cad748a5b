"""Attention kernels with mma.sync, sm_80 and up, one file each."""
