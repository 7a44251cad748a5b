# SPDX-License-Identifier: Apache-2.0
"""Attention kernels with wgmma, one file each."""
