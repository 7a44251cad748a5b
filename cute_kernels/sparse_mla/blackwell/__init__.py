# SPDX-License-Identifier: Apache-2.0
"""Attention kernels with tcgen05, one file each."""
