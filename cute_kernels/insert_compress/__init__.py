# SPDX-License-Identifier: Apache-2.0
"""All between the GEMMs and attention of a layer, in one launch.

ops.py                     what users call: schemas, checks, costs
reference.py               what it means: the ops that it is made of
call.py                    calls, their arguments by name, and the calls of those ops
insert_compress.py         kernel: layers of ratio 128
insert_compress_index.py   kernel: layers of ratio 4, with an indexer
verify_cases.py            calls that the kernels are verified with
"""
