# SPDX-License-Identifier: Apache-2.0
"""SGLang's own modules on a CPU with the plug-in over them: `python -m tests.plugins.real_sglang` in an environment of
scripts/test_engines.sh. They are imported, and have the plug-in's class, function and head count where they use them.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace

from tests.plugins import stubs


def main() -> None:
    # before the stub of torchvision, whose version transformers asks for
    importlib.import_module("transformers.models.auto.image_processing_auto")
    importlib.import_module("transformers.models.auto.processing_auto")
    stubs.install("IPython", "flash_mla", "sentencepiece", "torchvision")
    from cute_kernels.plugins import VARIABLE, sglang

    os.environ[VARIABLE] = "all"
    sglang.register()
    assert not {sglang.BACKEND, sglang.KERNELS, sglang.MODEL} & {*sys.modules}
    backend, kernels, model = (importlib.import_module(n) for n in (sglang.BACKEND, sglang.KERNELS, sglang.MODEL))
    kind = backend.DeepseekV4AttnBackend
    assert issubclass(kind, sglang.Backend)
    assert kind.__mro__[2].__module__ == sglang.BACKEND
    others = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_trtllm_backend")
    assert others.DeepseekV4AttnBackend is kind
    assert getattr(kernels, sglang.PREFILL).__module__ == sglang.__name__
    layer = SimpleNamespace(n_local_heads=8, is_dsv41=False, attn_tp_size=8)
    sglang.State.serves = True
    assert model.MQALayer._kernel_num_heads(layer, 1) == 8
    print("sglang: modules were imported and patched")


if __name__ == "__main__":
    main()
