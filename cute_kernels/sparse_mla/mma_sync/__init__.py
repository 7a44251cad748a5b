# SPDX-License-Identifier: Apache-2.0
"""Attention kernels with mma.sync, sm_80 and up, one file each."""
