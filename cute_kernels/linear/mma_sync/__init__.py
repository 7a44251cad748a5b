# SPDX-License-Identifier: Apache-2.0
"""GEMMs of every architecture from sm_80 on."""
