"""Attention kernels with wgmma, one file each."""
