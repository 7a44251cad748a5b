# SPDX-License-Identifier: Apache-2.0
"""GEMMs with tcgen05."""
