"""DeepSeek-V4 attention layers made of cute_kernels' ops: torch modules, caches, metadata and checkpoints."""

from layers.attention import AttentionOptions, DeepseekV4MultiHeadLatentAttentionWrapper
from layers.caches import (
    CompressorStateCache,
    DeepseekV4CompressedCache,
    DeepseekV4IndexerCache,
    DeepseekV4SWACache,
    LayerCaches,
)
from layers.checkpoint import CheckpointError, build_layer, held_layers, random_layer_tensors, read_layer_tensors
from layers.compressor import DeepseekCompressor
from layers.config import PRESETS, ConfigError, DeepseekV4Config
from layers.indexer import DeepseekV4Indexer, SparseAttnIndexer
from layers.metadata import BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder
from layers.mla import DeepseekV4FlashInferMLASparseImpl, DeepseekV4MLAAttention
from layers.mtp import DeepseekV4MTPNorms
from layers.parallel import TensorParallel
from layers.rotary import RotaryEmbedding

__all__ = [
    "PRESETS",
    "AttentionOptions",
    "BlockTables",
    "CheckpointError",
    "CompressorStateCache",
    "ConfigError",
    "DeepseekCompressor",
    "DeepseekV4CompressedCache",
    "DeepseekV4Config",
    "DeepseekV4FlashInferMLASparseImpl",
    "DeepseekV4Indexer",
    "DeepseekV4IndexerCache",
    "DeepseekV4MLAAttention",
    "DeepseekV4MTPNorms",
    "DeepseekV4Metadata",
    "DeepseekV4MetadataBuilder",
    "DeepseekV4MultiHeadLatentAttentionWrapper",
    "DeepseekV4SWACache",
    "LayerCaches",
    "RotaryEmbedding",
    "SparseAttnIndexer",
    "TensorParallel",
    "build_layer",
    "held_layers",
    "random_layer_tensors",
    "read_layer_tensors",
]
