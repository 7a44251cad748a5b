# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 and V4.1 attention layers made of cute_kernels' ops: torch modules, caches, metadata and checkpoints.

The package is cute_kernels.layers. In a checkout, whose top level has its folder, `layers` is a second name of it.

config.py, checkpoint.py    a model's numbers from its config.json, and a layer's weights from its files
attention.py                a whole layer; what it is made of:
    linear.py, stacked.py       products, also of several linears at once
    rotary.py, compressor.py    rotary tables; tokens become cache entries
    indexer.py                  which entries a row attends to
    mla.py                      attention over the caches
    output.py                   from heads to hidden states
mtp.py                      norms of the layer that predicts further tokens
caches.py, metadata.py      pools and their specs; block tables, and what the layers of a step share
bound.py, streams.py        launches kept for the next step; work beside the step's stream
engine.py                   what engines build their own layers from

communicator.py             collectives; parallel.py: tensor parallelism; score_rows.py: whether it divides scores
context.py                  context groups: who has which rows and pages; context_step.py: their steps,
                            context_attention.py: their attention
v41_layer.py                a whole layer of V4.1; the other v41_*.py are its parts, as above
verify.py                   layers on a GPU against the same ones on the CPU
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
from .context import ContextParallel, PrefillPlan, plan_prefill
from .context_step import ContextStep, ContextStepBuilder
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
from .v41_caches import V41Caches
from .v41_checkpoint import (
    build_v41_draft_context,
    build_v41_layer,
    random_v41_draft_context_tensors,
    random_v41_layer_tensors,
    read_v41_draft_context_tensors,
    read_v41_layer_tensors,
)
from .v41_config import V41_PRESETS, DeepseekV41Config
from .v41_draft import DeepseekV41DraftContext
from .v41_layer import DeepseekV41Attention, V41Options
from .v41_step import V41Selection, V41Step, V41StepBuilder, V41Tables, late_rows

__all__ = [
    "PRESETS",
    "V41_PRESETS",
    "AttentionOptions",
    "BlockTables",
    "CheckpointError",
    "Communicator",
    "CommunicatorError",
    "CompressorStateCache",
    "ConfigError",
    "ContextParallel",
    "ContextStep",
    "ContextStepBuilder",
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
    "DeepseekV41Attention",
    "DeepseekV41Config",
    "DeepseekV41DraftContext",
    "GroupCommunicator",
    "KVCacheSpec",
    "LayerCaches",
    "PrefillPlan",
    "RotaryEmbedding",
    "SparseAttnIndexer",
    "TensorParallel",
    "ThreadCommunicator",
    "V41Caches",
    "V41Options",
    "V41Selection",
    "V41Step",
    "V41StepBuilder",
    "V41Tables",
    "build_layer",
    "build_v41_draft_context",
    "build_v41_layer",
    "deepseek_v4_attention",
    "forward_context",
    "get_kv_cache_spec",
    "held_layers",
    "late_rows",
    "plan_prefill",
    "random_layer_tensors",
    "random_v41_draft_context_tensors",
    "random_v41_layer_tensors",
    "read_layer_tensors",
    "read_v41_draft_context_tensors",
    "read_v41_layer_tensors",
    "register_layer",
    "unregister_layer",
]
