# SPDX-License-Identifier: Apache-2.0
"""Index tables for attention: which rows of which cache a token attends to.

ops.py                 what users call: schemas, checks, costs
reference.py           what it means, in torch; also the CPU implementation
call.py                calls, their arguments by name; where the results of build_step_metadata lie
launching.py           what the launches of the kernels below share

window.py              kernel: slots of decode windows
translate.py           kernel: picks to slots
combine.py             kernel: picks and windows of gathered rows
mixed.py               kernel: rows over two plain caches
c128a.py               kernel: entries of layers of ratio 128
step_metadata.py       kernel: all that the layers of a step share
verify_cases.py        calls that the kernels are verified with
"""
