# SPDX-License-Identifier: Apache-2.0
"""What ops and kernels of every package run on: registration, checks, compilation, verification.

ops.py                 defines an op: schema, checks, fake, implementations
plans.py               calls that come again, as the launches that they come down to; kept.py: until when
registry.py            which ops there are, their kernels, and the keys of deployments
record.py              what ran, for whoever listens
contract.py            checks of arguments that hold for every op
checks.py              `Checker`, with which ops make their own ones and word what they refuse; checks of data

key.py                 what a compiled kernel is known by; sources.py: which source files its code depends on
compile.py             a key as a function that launches it, and a report (report.py) on what the compiler made of it
cache.py               compiled kernels on disk; ownership.py: whose files are loaded; bundle.py: caches that are shared
precompile.py          many kernels at once, in processes of their own
code_hash.py           hashes of machine code: has it changed?

arch.py                which architecture a device has, and what that offers
verify.py              kernels against their references on this GPU; isolated.py: in processes that may crash
trust.py               whether an architecture's own kernel may run here
work.py                what a tensor-core kernel moves and computes, for rooflines
streams.py             CUDA streams that are nobody else's
log.py                 what the library logs
"""
