# SPDX-License-Identifier: Apache-2.0
"""Score kernels with tcgen05."""
