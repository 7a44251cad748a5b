# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that put this package's ops into an engine: vLLM finds `plugins.vllm.register` and SGLang
`plugins.sglang.register` by entry points. plugin.py has what they share, sglang_plans.py how SGLang's plans of
compression are read."""

from cute_kernels.plugins.plugin import PARTS, VARIABLE, Plugin, numbers, on_import, rebind

__all__ = ["PARTS", "VARIABLE", "Plugin", "numbers", "on_import", "rebind"]
