# SPDX-License-Identifier: Apache-2.0
"""What a layer's weights are, and that those that read the same input stay below each other."""

from __future__ import annotations

import pytest
import torch

from layers import PRESETS, AttentionOptions, DeepseekCompressor, DeepseekV4MultiHeadLatentAttentionWrapper
from tests.layers.engine import make_layer

CONFIG = PRESETS["v4-flash"]


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_norm_weights_are_ones_in_bf16(ratio: int) -> None:
    layer = DeepseekV4MultiHeadLatentAttentionWrapper(
        CONFIG.reduced(), CONFIG.layer_of_kind(ratio), options=AttentionOptions(max_model_len=256, max_num_tokens=256)
    )
    norms = {name: value for name, value in layer.named_buffers() if name.endswith("norm_weight")}
    assert len(norms) == {1: 2, 4: 4, 128: 3}[ratio]
    for name, value in norms.items():
        assert value.dtype == torch.bfloat16, name
        assert (value == 1).all(), name
    compressors = [module for module in layer.modules() if isinstance(module, DeepseekCompressor)]
    assert [module.ape.dtype for module in compressors] == [torch.float32] * {1: 0, 4: 2, 128: 1}[ratio]


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_weights_are_stacked_again_where_others_take_their_place(ratio: int, quantized: bool) -> None:
    layer = make_layer(ratio, quantized=quantized)
    queries, hidden = layer._query_weights, layer._hidden_weights
    assert (queries is not None, hidden is not None) == (ratio == 4 and quantized, ratio == 4)
    layer.cpu()
    assert layer._query_weights is queries, "they lie where they lay"
    assert layer._hidden_weights is hidden
    if hidden is None:
        return
    linear = hidden.linears[1]
    values = linear.weight.clone()
    linear.weight = values
    assert not hidden.is_tied
    layer.cpu()
    again = layer._hidden_weights
    assert again is not None
    assert again is not hidden
    assert again.is_tied
    assert torch.equal(linear.weight, values)
