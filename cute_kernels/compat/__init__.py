# SPDX-License-Identifier: Apache-2.0
"""Entry points with the names and arguments of other projects: an engine switches by changing an import.

Each module maps arguments to the ops of this package and does nothing else. What the ops have no counterpart for is
refused by name. None of the projects has to be installed. docs/switching.md lists the imports and what differs.
"""
