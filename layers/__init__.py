# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 attention layers made of cute_kernels' ops: torch modules, caches, metadata and checkpoints.

The package is cute_kernels.layers. In a checkout, whose top level has its folder, `layers` is a second name of it.
"""

import importlib
import pkgutil
import sys

if __name__ == "layers":
    # Imported by its short name: everything here is, and stays, what the installed name gives.
    sys.modules[__name__] = importlib.import_module("cute_kernels.layers")
    for _module in pkgutil.iter_modules(__path__):
        sys.modules[f"layers.{_module.name}"] = importlib.import_module(f"cute_kernels.layers.{_module.name}")

from .attention import AttentionOptions, DeepseekV4MultiHeadLatentAttentionWrapper
from .caches import (
    CompressorStateCache,
    DeepseekV4CompressedCache,
    DeepseekV4IndexerCache,
    DeepseekV4SWACache,
    LayerCaches,
)
from .checkpoint import CheckpointError, build_layer, held_layers, random_layer_tensors, read_layer_tensors
from .communicator import Communicator, CommunicatorError, GroupCommunicator, ThreadCommunicator
from .compressor import DeepseekCompressor
from .config import PRESETS, ConfigError, DeepseekV4Config
from .engine import (
    DeepseekV4FlashInferMLASparseBackend,
    DeepseekV4MLABackend,
    DeepseekV4MLAModules,
    KVCacheSpec,
    deepseek_v4_attention,
    forward_context,
    get_kv_cache_spec,
    register_layer,
    unregister_layer,
)
from .indexer import DeepseekV4Indexer, SparseAttnIndexer
from .metadata import BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder
from .mla import DeepseekV4FlashInferMLASparseImpl, DeepseekV4MLAAttention
from .mtp import DeepseekV4MTPNorms
from .parallel import TensorParallel
from .rotary import RotaryEmbedding

__all__ = [
    "PRESETS",
    "AttentionOptions",
    "BlockTables",
    "CheckpointError",
    "Communicator",
    "CommunicatorError",
    "CompressorStateCache",
    "ConfigError",
    "DeepseekCompressor",
    "DeepseekV4CompressedCache",
    "DeepseekV4Config",
    "DeepseekV4FlashInferMLASparseBackend",
    "DeepseekV4FlashInferMLASparseImpl",
    "DeepseekV4Indexer",
    "DeepseekV4IndexerCache",
    "DeepseekV4MLAAttention",
    "DeepseekV4MLABackend",
    "DeepseekV4MLAModules",
    "DeepseekV4MTPNorms",
    "DeepseekV4Metadata",
    "DeepseekV4MetadataBuilder",
    "DeepseekV4MultiHeadLatentAttentionWrapper",
    "DeepseekV4SWACache",
    "GroupCommunicator",
    "KVCacheSpec",
    "LayerCaches",
    "RotaryEmbedding",
    "SparseAttnIndexer",
    "TensorParallel",
    "ThreadCommunicator",
    "build_layer",
    "deepseek_v4_attention",
    "forward_context",
    "get_kv_cache_spec",
    "held_layers",
    "random_layer_tensors",
    "read_layer_tensors",
    "register_layer",
    "unregister_layer",
]
