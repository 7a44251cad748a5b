"""Kernels for Hopper (sm_90a): wgmma and bulk tensor copies."""
