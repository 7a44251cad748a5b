# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper (sm_90a): wgmma and bulk tensor copies."""
