# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder run is compiled once for all tests: see tests/compile/reports.py."""

from tests.compile.conftest import kept as kept
