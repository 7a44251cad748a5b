# SPDX-License-Identifier: Apache-2.0
"""Which ops there are, which kernels they have, and which keys a deployment needs.

A kernel declares its keys once, as `deployment_keys(config, tp, arch)` of the OpKernel that an op has from
`define_op(kernel=...)`. So the kernels of a deployment can be enumerated, and compiled ahead, from the model's
configuration, the number of tensor-parallel ranks and the architecture.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import time

import cute_kernels
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.log import logger
from cute_kernels.runtime.ops import OPS, Op


def all_ops() -> dict[str, Op]:
    """Every op of the package by name: imports the `ops` module of each subpackage (no kernel, no compiler)."""
    for package in pkgutil.iter_modules(cute_kernels.__path__, "cute_kernels."):
        if package.ispkg:
            found = importlib.util.find_spec(f"{package.name}.ops")
            if found is not None:
                importlib.import_module(found.name)
    return dict(OPS)


def ops_with_kernels() -> list[Op]:
    """Those of all ops that have one, in the order of definition."""
    return [op for op in all_ops().values() if op.kernel is not None]


def deployment_keys(config: ModelConfig, tp: int = 1, arch: str = "sm_90a") -> list[KernelKey]:
    """Keys of all kernels that serving a model needs on one of `tp` ranks, each once. Imports CuTe DSL.

    config   cute_kernels.layers.DeepseekV4Config or cute_kernels.models.ModelShape; of V4.1 models.V41Shape
    tp       tensor-parallel ranks, a divisor of num_attention_heads
    arch     compile target, for example "sm_90a"

    Raises ValueError on an architecture that does not exist and on a `tp` that does not fit.
    """
    from cute_kernels.runtime.arch import check_arch

    check_arch(arch)
    ratios = set(config.compress_ratios)
    if not ratios <= {1, 4, 128}:  # V4.1's 1 is no window alone
        raise ValueError(f"config: expected compress ratios of V4, or a V41Shape, got {sorted(ratios)}")
    heads = config.num_attention_heads
    if type(tp) is not int or tp < 1 or heads % tp:
        raise ValueError(f"tp: expected a divisor of num_attention_heads = {heads}, got {tp!r}")
    keys: dict[KernelKey, None] = {}
    for op in ops_with_kernels():
        keys.update(dict.fromkeys(op.load_kernel().deployment_keys(config, tp, arch)))
    return list(keys)


def warmup(config: ModelConfig, tp: int = 1, arch: str | None = None) -> list[KernelKey]:
    """Have every kernel that serving a model needs ready, and return their keys.

    Afterwards no op of the layers compiles anything, neither inside a CUDA-graph capture nor outside, whatever their
    options. Calls that the layers do not make may: norm weights in fp32, int32 positions, pages whose rows are no power
    of two, pools that are not aligned as this project allocates them. Kernels come from the disk cache where it has
    them and are compiled into it where it does not.

    config   cute_kernels.layers.DeepseekV4Config or cute_kernels.models.ModelShape; of V4.1 models.V41Shape
    tp       tensor-parallel ranks, a divisor of num_attention_heads
    arch     compile target; None: that of the current CUDA device. For another one than the device's, and on a machine
             without a GPU, the kernels are only put into the disk cache

    Raises ValueError on an architecture that does not exist, on a GPU that is too old, and on a `tp` that does not fit;
    RuntimeError where a kernel would have to be compiled and CUTE_KERNELS_JIT=forbid.
    """
    import torch

    from cute_kernels.runtime import cache
    from cute_kernels.runtime import compile as compile_
    from cute_kernels.runtime.arch import arch_of

    here = arch_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
    target = here if arch is None else arch
    if target is None:
        raise ValueError("warmup: arch: expected a target such as 'sm_90a' on a machine without a GPU, got None")
    if target != here and cache.current() is None:
        raise RuntimeError(f"warmup: no disk cache to keep kernels for {target} in ({cache.DIRECTORY_VARIABLE})")
    keys = deployment_keys(config, tp, target)
    start, compiled = time.perf_counter(), compile_.compilations()
    for key in keys:
        if target == here:
            compile_.function(key)
        else:
            compile_.prepare(key)
    compiled = compile_.compilations() - compiled
    logger.info("warmup: %d kernels, %d compiled, in %.1f s", len(keys), compiled, time.perf_counter() - start)
    return keys
