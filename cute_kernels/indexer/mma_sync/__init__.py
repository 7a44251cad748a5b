# SPDX-License-Identifier: Apache-2.0
"""Score kernels of every architecture from sm_80 on."""
