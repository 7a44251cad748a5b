# SPDX-License-Identifier: Apache-2.0
"""Paged caches of keys: rows inserted, rows gathered, and the step before attention.

ops.py                 what users call: schemas, checks, costs
reference.py           what it means, in torch; also the CPU implementation
call.py                calls, their arguments by name

qnorm.py               kernel: queries normed and rotated, keys rotated and inserted
query_norm.py          the order in which the squares of a query's head are summed, wherever that is done
insert.py, gather.py   kernels: rows inserted and gathered
pack.py                kernels: records packed and unpacked, byte for byte
record.py              fp8_ds_mla rows as a warp holds them
verify_cases.py        calls that the kernels are verified with
"""
