"""Score kernels with wgmma, one file each."""
