# SPDX-License-Identifier: Apache-2.0
"""Score kernels with wgmma, one file each."""
