# SPDX-License-Identifier: Apache-2.0
"""What the installed CuTe DSL makes of ten kernels: `python -m tests.compile.oldest_dsl` prints it as JSON.

versions   distribution -> its version
problems   key -> what is wrong with the kernel
loads      whether TVM-FFI loads a kernel's function from its object
"""

from __future__ import annotations

import json

import cutlass
import tvm_ffi

from cute_kernels.models import MODELS
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.registry import deployment_keys
from cute_kernels.runtime.report import problems

LOADED = "kv_cache.qnorm"
NAMES = {
    "sm_90a": (
        "compressor.ratio4", "indexer.hopper.logits", "indexer.topk_any", LOADED, "linear.hopper.gemm_swap_ab",
        "sparse_mla.hopper.decode",
    ),
    "sm_100a": ("indices.translate", "norm.rms", "output.blackwell.einsum", "sparse_mla.blackwell.decode"),
}  # fmt: skip
"""Of each the first key of a deployment. Among them: TMA, wgmma, tcgen05, dependent launch."""


def main() -> None:
    keys = []
    for arch, names in NAMES.items():
        first = {key.kernel_name: key for key in reversed(deployment_keys(MODELS["v4-flash"], 1, arch))}
        keys += [first[name] for name in names]
    (loaded,) = (key for key in keys if key.kernel_name == LOADED)
    found = {
        "versions": {"nvidia-cutlass-dsl": cutlass.__version__, "apache-tvm-ffi": tvm_ffi.__version__},
        "problems": {str(key): problems(key, compile_.compile_report(key)) for key in keys if key != loaded},
        "loads": type(getattr(compile_.function(loaded), "raw", None)) is tvm_ffi.Function,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
