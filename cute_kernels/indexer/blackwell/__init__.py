"""Score kernels with tcgen05."""
