# SPDX-License-Identifier: Apache-2.0
"""What the matrix of promises is made of: the calls that ops are verified with, on the GPU, in memory that is watched;
and the tables that say which kernels an op can run and what its arguments are.

Nothing here knows how an op works. A table that is wrong makes a test fail or say that it tried nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.runtime import trust, verify
from cute_kernels.runtime.compile import collect, watch_launches
from cute_kernels.runtime.contract import is_cache
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, Op
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.verify import Example
from tests.contract.drawn import refuses
from tests.gpu.ahead import compile_ahead

CPU, DEVICE = torch.device("cpu"), torch.device("cuda")
GUARD = 4096
"""Bytes on both sides of each memory: more than a page of any example's neighbour that a copy could reach for."""

OPS = {name: op for name, op in sorted(all_ops().items()) if op.kernel is not None}

# ---- which kernels an op can run -------------------------------------------------------------------------------------

_SELECT = "cute_kernels.sparse_mla.select"
_NO_HOPPER = {"HOPPER": ""}

KERNELS: dict[str, dict[str, tuple[str, Mapping[str, Any]]]] = {
    "portable": {
        "sparse_mla_decode": (_SELECT, _NO_HOPPER | {"BLACKWELL": (), "SMALL_HEADS": ()}),
        **dict.fromkeys(("sparse_mla_prefill", "sparse_mla_prefill_paged", "sparse_mla_mixed"), (_SELECT, _NO_HOPPER)),
        **dict.fromkeys(
            ("mqa_logits", "paged_mqa_logits", "score_top_k_decode", "score_top_k_prefill"),
            ("cute_kernels.indexer.select", {"has_own": lambda *args: False}),
        ),
        **dict.fromkeys(("fp8_gemm", "deepseek_v4_fp8_einsum"), ("cute_kernels.linear.launch", _NO_HOPPER)),
    },
    "no clusters": dict.fromkeys(
        ("compress_norm_rope_store", "fused_compress_norm_rope_store"),
        ("cute_kernels.compressor.ratio128", {"runs_on": lambda arch: False}),
    ),
    "small heads": {
        "sparse_mla_decode": (
            _SELECT,
            {"BLACKWELL": (), "SMALL_HEADS": (8, 16), "SWAP_AB_HEADS": (), "FEW_ROWS_HEADS": ()},
        ),
    },
}
"""Kernels that calls do not choose by themselves here -> op -> the module that chooses, and what to change there."""

CASES = [(name, "chosen") for name in OPS] + [(name, kernel) for kernel, ops in KERNELS.items() for name in ops]


def use_kernel(op: str, kernel: str, patch: pytest.MonkeyPatch) -> None:
    """Have calls of `op` run the kernel of that name, trusted or not, and no reference."""
    patch.delenv(FALLBACK_VARIABLE, raising=False)
    patch.setattr(trust, "is_trusted", lambda *args: kernel != "portable")
    if kernel == "chosen":
        return
    name, changes = KERNELS[kernel][op]
    module = importlib.import_module(name)
    for attribute, value in changes.items():
        patch.setattr(module, attribute, value)
    for attribute, value in list(vars(module).items()):
        if attribute.endswith("_key") and hasattr(value, "__wrapped__"):
            patch.setattr(module, attribute, value.__wrapped__)  # what has been chosen is kept


# ---- calls -----------------------------------------------------------------------------------------------------------


class Call:
    """An example's arguments on the GPU. Guards lie around each memory, and `poison`, if it is given, is in them and in
    every byte that no argument covers.

    covered   bytes of each memory that belong to elements of arguments
    written   those of them that belong to elements of results
    scratch   those of them that belong to elements of a workspace
    start     what lies in the memories before the call, guards included
    """

    def __init__(self, op: Op, args: Sequence[Any], poison: int | None = None) -> None:
        self.op = op
        self.memories: list[torch.Tensor] = []
        self.covered: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []
        self.scratch: list[torch.Tensor] = []
        self.places: list[int | None] = []
        """Of each argument, the number of its memory."""
        known: dict[int, int] = {}
        schema = op.overload._schema.arguments
        self.args = tuple(self._placed(argument, value, known) for argument, value in zip(schema, args, strict=True))
        if poison is not None:
            for memory, covered in zip(self.memories, self.covered, strict=True):
                memory[~covered] = poison
        self.start = [memory.clone() for memory in self.memories]

    def _placed(self, argument: Any, value: Any, known: dict[int, int]) -> Any:
        if not isinstance(value, torch.Tensor):
            self.places.append(None)
            return value
        raw = verify.raw_memory(value)
        place = known.setdefault(raw.data_ptr(), len(self.memories))
        if place == len(self.memories):
            memory = torch.full((raw.numel() + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)
            memory[GUARD : GUARD + raw.numel()] = raw.to(DEVICE)
            self.memories.append(memory)
            for masks in (self.covered, self.written, self.scratch):
                masks.append(torch.zeros_like(memory, dtype=torch.bool))
        self.places.append(place)
        size = value.element_size()
        offset = value.storage_offset() + GUARD // size
        strides = tuple(stride * size for stride in value.stride())
        is_written, is_scratch = argument.alias_info is not None, argument.name == "workspace"
        for masks, is_so in ((self.covered, True), (self.written, is_written), (self.scratch, is_scratch)):
            if is_so:
                masks[place].as_strided((*value.shape, size), (*strides, 1), offset * size).fill_(True)
        return _view(self.memories[place], value, offset)

    def run(self) -> None:
        self.op.overload(*self.args)

    def reset(self) -> None:
        for memory, start in zip(self.memories, self.start, strict=True):
            memory.copy_(start)

    def clear(self) -> None:
        """Zeros everywhere: no lengths, no indices but the first, no values."""
        for memory in self.memories:
            memory.zero_()

    def result(self) -> list[torch.Tensor]:
        """All memory after one more run."""
        self.reset()
        self.run()
        return [memory.clone() for memory in self.memories]

    def expected(self, result: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What memory looks like after the call if another one, of other poison, came to `result`."""
        return _chosen(self.covered, result, self.start)

    def but_scratch(self, want: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`want`, but what lies in a workspace now: that is no result."""
        return _chosen(self.scratch, self.memories, want)

    def harm(self) -> str:
        """ "", or where memory changed that belongs to no result."""
        return self.difference(self.memories, _chosen(self.written, self.memories, self.start))

    def on_cpu(self) -> tuple[Any, ...]:
        """The arguments as they are now, without guards."""
        inner = [memory[GUARD : memory.numel() - GUARD].clone().to(CPU) for memory in self.memories]
        return tuple(
            value if place is None else _view(inner[place], value, value.storage_offset() - GUARD // value.itemsize)
            for value, place in zip(self.args, self.places, strict=True)
        )

    def difference(self, result: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str:
        """ "", or where memory differs."""
        for number, (got, wanted) in enumerate(zip(result, want, strict=True)):
            if not torch.equal(got, wanted):
                at = (got != wanted).nonzero()[:, 0]
                first, byte = int(at[0]), int(at[0]) - GUARD
                kind = "an element" if bool(self.covered[number][first]) else "no element"
                schema = self.op.overload._schema.arguments
                owners = [a.name for a, place in zip(schema, self.places, strict=True) if place == number]
                return f"{', '.join(owners)}: {len(at)} bytes differ, the first is byte {byte}, of {kind}"
        return ""


def _chosen(
    masks: Sequence[torch.Tensor], there: Sequence[torch.Tensor], elsewhere: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.where(mask, a, b) for mask, a, b in zip(masks, there, elsewhere, strict=True)]


def _view(memory: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    typed = torch.empty(0, dtype=like.dtype, device=memory.device)
    return typed.set_(memory.untyped_storage(), offset, like.shape, like.stride())


@functools.cache
def examples(op: str) -> list[Example]:
    """All calls that an op is verified with, small ones first."""
    made = verify.examples_of(OPS[op])
    assert made is not None, f"{op}: expected examples in its package's verify_cases, got none"

    def size(example: Example) -> int:
        return sum(value.untyped_storage().nbytes() for value in example.args if isinstance(value, torch.Tensor))

    return sorted(made(), key=size)


def is_empty(op: Op, args: Sequence[Any]) -> bool:
    return not any(value.numel() for value in op.mutated(tuple(args)).values())


def kernels_of(op: Op, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The keys of what a call launches; None: no kernel takes it here. Not by way of the op, which remembers calls that
    another kernel took."""
    call = verify.clone_arguments(args, DEVICE)
    op.check(*call)
    if is_empty(op, call):
        return ()
    kernel, record = op.load_kernel(), op.call_type(*call)
    if kernel.why_not(record):
        return None
    with collect() as keys:
        kernel.launch(record)
    return tuple(keys)


@functools.cache
def launched(op: str, kernel: str) -> list[tuple[Any, ...] | None]:
    """`kernels_of` each example, compiled side by side. Call it under `use_kernel`, as what follows."""
    found = [kernels_of(OPS[op], example.args) for example in examples(op)]
    compile_ahead(key for keys in found for key in keys or ())
    return found


@functools.cache
def chosen_examples(op: str, kernel: str) -> list[int]:
    """Numbers of the smallest examples that between them launch every kernel that all of them do."""
    chosen: list[int] = []
    seen: set[Any] = set()
    for number, keys in enumerate(launched(op, kernel)):
        if keys and not seen.issuperset(keys):
            seen.update(keys)
            chosen.append(number)
    assert chosen, f"{op}: no example has a kernel here"
    return chosen


@functools.cache
def result_of(op: str, kernel: str, number: int) -> tuple[torch.Tensor, ...]:
    """Memory after an example, which agrees with the reference."""
    example = examples(op)[number]
    call = Call(OPS[op], example.args)
    result = tuple(call.result())
    why = disagreement(OPS[op], example, example.args, call.on_cpu())
    assert not why, f"{example.name}: {why}"
    return result


def disagreement(op: Op, example: Example, args: Sequence[Any], got: Sequence[Any]) -> str:
    """ "", or how `got`, the arguments after a call with `args`, differs from what the reference makes of them. A NaN
    agrees with a NaN: what examples compare with tolerances knows none, so that numbers stand for both."""
    want = verify.clone_arguments(args, CPU)
    op.reference(*want)
    names = [argument.name for argument in op.overload._schema.arguments]
    if example.agree is None:
        return verify.compare_arguments(names, got, want)
    instead = list(verify.clone_arguments(args, CPU))
    for value in instead:
        if isinstance(value, torch.Tensor):
            _integers(value)[_is_nan(value)] = 0
    if op.name in PRODUCTS:
        op.reference(*instead)
    if op.name == "fp8_gemm_squares":
        # sums are held against the results at hand, for some of which numbers stand
        out = torch.where(got[4].isnan(), instead[4], got[4])[:, : got[5].shape[1] * 128]
        instead[5] = out.double().unflatten(1, (-1, 128)).square().sum(-1).float()
    for mine, wanted, number in zip(got, want, instead, strict=True):
        if isinstance(wanted, torch.Tensor):
            both = _is_nan(mine) & _is_nan(wanted)
            for value in (mine, wanted):
                _integers(value)[both] = _integers(number)[both]
    return example.agree(got, want)


PRODUCTS = ("bf16_gemm", "deepseek_v4_fp8_einsum", "fp8_bf16_gemm", "fp8_gemm", "fp8_gemm_squares")
"""Ops whose examples compare with products of the arguments themselves."""


def _integers(value: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that can be indexed and filled whatever the values' type."""
    return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value


def _is_nan(value: torch.Tensor) -> torch.Tensor:
    return (_integers(value) & 0x7F) == 0x7F if value.dtype == torch.float8_e4m3fn else value.isnan()


def launches_of(call: Callable[[], None]) -> int:
    with watch_launches() as launches:
        call()
    return len(launches)


# ---- rows ------------------------------------------------------------------------------------------------------------

ROWS: dict[str, Mapping[str, int]] = {
    "bf16_gemm": {"a": 0, "out": 0},
    "compress_norm_rope_store": dict.fromkeys(
        ("token_to_req_indices", "positions", "slot_mapping", "kv_slot_mapping"), 0
    ),
    "compute_decode_swa_indices": dict.fromkeys(
        ("positions", "token_to_req_indices", "is_valid_token", "out_indices", "out_lens"), 0
    ),
    "compute_global_topk_indices_and_lens": dict.fromkeys(
        ("topk_indices", "token_to_req_indices", "is_valid_token", "out_indices", "out_lens"), 0
    ),
    "deepseek_v4_fp8_einsum": {"a": 0, "a_scale": 0, "out": 0},
    "fp8_bf16_gemm": dict.fromkeys(("a", "a_scale", "out", "x", "x_out"), 0),
    "fp8_gemm": {"a": 0, "a_scale": 0, "out": 0, "out_scale": 1},
    "fp8_gemm_squares": {"a": 0, "a_scale": 0, "out": 0, "squares": 0},
    **dict.fromkeys(
        (
            "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
            "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
            "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
        ),
        dict.fromkeys(("q", "kv", "q_fp8", "slot_mapping", "positions"), 0),
    ),
    **dict.fromkeys(
        ("fused_indexer_q_rope_quant_fp8", "fused_indexer_q_rope_quant_mxfp4"),
        dict.fromkeys(("positions", "index_q", "index_weights", "q_quant", "q_scale", "weights_out"), 0),
    ),
    "fused_inv_rope": {"o": 0, "positions": 0, "out": 0},
    "fused_inv_rope_fp8_quant": {"o": 0, "positions": 0, "out": 0, "scale_out": 2},
    "fused_mtp_input_rmsnorm": dict.fromkeys(
        ("inputs_embeds", "positions", "previous_hidden_states", "enorm_out", "hnorm_out"), 0
    ),
    "fused_q_kv_rmsnorm": dict.fromkeys(("qr", "kv", "qr_out", "kv_out"), 0),
    "fused_q_kv_rmsnorm_quant": dict.fromkeys(("qr", "kv", "out", "kv_out", "qr_out"), 0) | {"scale_out": 1},
    "k_norm_rope_store": dict.fromkeys(("k", "positions", "slot_mapping"), 0),
    "merge_attention_states": {"outs": 1, "lses": 1, "out": 0, "lse": 0},
    "mqa_logits": dict.fromkeys(("q", "q_scale", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "out"), 0),
    "mtp_shared_head_rmsnorm": {"hidden_states": 0, "out": 0},
    "pack_records": {"slots": 0, "out": 0},
    "quantize_and_insert_k_cache": {"k": 0, "slot_mapping": 0},
    "quantize_fp8_1x128": {"x": 0, "out": 0, "scale_out": 1},
    "rope_quant_insert": dict.fromkeys(("latent", "positions", "slot_mapping"), 0),
    "save_partial_states": dict.fromkeys(("kv", "score", "positions", "slot_mapping"), 0),
    "sparse_mla_decode": dict.fromkeys(
        (
            *("q", "indices", "topk_length", "extra_indices", "extra_topk_length", "extra_block_table"),
            *("extra_length", "out", "lse", "q_squares", "positions"),
        ),
        0,
    )
    | {"out_scale": 2},
    "sparse_mla_prefill": dict.fromkeys(
        ("q", "indices", "topk_length", "out", "max_logits", "lse", "q_squares", "positions"), 0
    )
    | {"out_scale": 2},
    "top_k_keys": dict.fromkeys(("scores", "picks", "out"), 0),
    "unpack_records": {"records": 0, "slots": 0},
}
"""Ops of which each row is a call of its own -> the arguments that have rows, and along which axis."""

_FUSED = ("kv_score", "positions", "token_to_req_indices", "slot_mapping", "kv_slot_mapping")
_INSERTED = (
    *("q", "kv", "slot_mapping", "positions", "token_to_req_indices", "state_slot_mapping", "entry_slot_mapping"),
    *("kv_score", "index_kv_score", "index_q", "index_weights", "index_q_quant", "index_weights_out"),
)
_SCORED = ("q", "q_scale", "weights", "context_lens", "block_tables", "slot_block_table", "out")

NO_ROWS: dict[str, Mapping[str, int]] = ROWS | {
    "all_visible_entries": dict.fromkeys(("visible", "out", "slot_block_table"), 0),
    "build_c128a_topk_metadata": dict.fromkeys(
        (
            *("positions", "token_to_req_indices", "slot_mapping"),
            *("global_decode_buffer", "decode_lens_buffer", "prefill_buffer"),
        ),
        0,
    ),
    "build_flashinfer_mixed_sparse_indices": dict.fromkeys(
        (
            *("decode_swa_indices", "decode_compressed_indices", "decode_compressed_topk_lens", "prefill_topk_indices"),
            *("token_to_req_indices", "decode_is_valid_token", "sparse_indices", "sparse_topk_lens"),
        ),
        0,
    ),
    "combine_topk_swa_indices": dict.fromkeys(("topk_indices", "out_indices", "out_lens"), 0),
    "compress_latent": dict.fromkeys(("kv_score", "positions", "token_to_req_indices", "slot_mapping", "out"), 0),
    "cp_gather_indexer_k_quant_cache": dict.fromkeys(("dst_k", "dst_scale"), 0),
    "dequantize_and_gather_k_cache": dict.fromkeys(("out", "seq_lens", "gather_lens", "block_table"), 0),
    "fused_compress_norm_rope_store": dict.fromkeys(_FUSED, 0),
    "fused_qkv_insert_compress": dict.fromkeys(_INSERTED, 0),
    "fused_qkv_insert_compress_index": dict.fromkeys(_INSERTED, 0),
    "get_compressed_slot_mapping": dict.fromkeys(("out", "slot_mapping"), 0),
    "merge_top_k_keys": {"keys": 1} | dict.fromkeys(("out", "out_slots", "out_lens"), 0),
    "paged_mqa_logits": dict.fromkeys(_SCORED, 0),
    "score_candidates_decode": dict.fromkeys((*_SCORED, "candidates"), 0),
    "score_candidates_prefill": dict.fromkeys(
        ("q", "q_scale", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "candidates", "out"), 0
    ),
    "score_top_k_decode": dict.fromkeys(_SCORED, 0),
    "score_top_k_prefill": dict.fromkeys(
        ("q", "q_scale", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "out"), 0
    ),
    "select_candidate_blocks": dict.fromkeys(("logits", "seq_lens", "out"), 0),
    "sparse_mla_mixed": dict.fromkeys(("query", "sparse_indices", "sparse_topk_lens", "out", "lse"), 0),
    "sparse_mla_prefill_paged": dict.fromkeys(
        ("q", "topk_indices", "out", "max_logits", "lse", "q_squares", "positions"), 0
    )
    | {"out_scale": 2},
    "top_k_per_row_decode": dict.fromkeys(("logits", "seq_lens", "out", "slot_block_table"), 0),
    "top_k_per_row_prefill": dict.fromkeys(("logits", "row_starts", "row_ends", "out"), 0),
}
"""The same of all ops that can be called without a row."""

NUMBERS_OF_ROWS = ("num_rows", "num_tokens", "num_decode_tokens")

ALIGNED_ROWS = ("scale_out", "out_scale")
"""Arguments with room for a multiple of 4 rows, which pieces of a call have to be, too."""


DEFINED = ("dequantize_and_gather_k_cache",)
"""Ops that say what they do of data which checked mode refuses."""


def is_defined(op: str, args: Sequence[Any]) -> bool:
    """Whether the reference says what comes out."""
    return op in DEFINED or not refuses(OPS[op].validate, args)


def is_row_by_row(op: str, given: Mapping[str, Any]) -> bool:
    """Whether a row's bits do not depend on the number of rows, in this call."""
    if op == "sparse_mla_decode":
        return (given["split_tokens"] > 0 or given["num_splits"] == 1) and given["out_scale"] is None
    return bool(given.get("batch_invariant", True))


def pieces(op: str, args: Sequence[Any]) -> list[tuple[Any, ...]] | None:
    """The call as several calls that write into the same results; None: it has too few rows, or is not row by row."""
    names = [argument.name for argument in OPS[op].overload._schema.arguments]
    given, axes = dict(zip(names, args, strict=True)), ROWS[op]
    if not is_row_by_row(op, given):
        return None
    first = next(iter(axes))
    rows, is_aligned = given[first].shape[axes[first]], any(given.get(n) is not None for n in ALIGNED_ROWS)
    ends = [4, 8, rows] if is_aligned else [1, 2, rows]
    if rows <= ends[1]:
        return None
    made = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = dict(given)
        for name, axis in axes.items():
            if isinstance(given.get(name), torch.Tensor):
                size = given[name].shape[axis]
                stop = size if end == rows else min(end, size)
                part[name] = given[name].narrow(axis, min(start, size), max(stop - start, 0))
        made.append(tuple(part.values()))
    return made


def without_rows(op: str, calls: Iterable[Example] | None = None) -> list[tuple[Any, ...]]:
    """The op's calls, or some, of no rows."""
    names = [argument.name for argument in OPS[op].overload._schema.arguments]
    made = []
    for example in examples(op) if calls is None else calls:
        given = dict(zip(names, example.args, strict=True))
        given |= dict.fromkeys((name for name in NUMBERS_OF_ROWS if name in given), 0)
        tensors = {name: axis for name, axis in NO_ROWS[op].items() if given.get(name) is not None}
        given |= {name: given[name].narrow(axis, 0, 0) for name, axis in tensors.items()}
        made.append(tuple(given.values()))
    return made


# ---- strides ---------------------------------------------------------------------------------------------------------


def strided(op: str, args: Sequence[Any]) -> tuple[list[str], tuple[Any, ...]]:
    """The names of those arguments that the op takes as slices of larger tensors, and the call with all of them so. The
    same kernels run."""
    keys, schema = kernels_of(OPS[op], args), OPS[op].overload._schema.arguments
    changed, names = list(args), []
    for place, argument in enumerate(schema):
        value = args[place]
        if not isinstance(value, torch.Tensor) or not value.numel() or is_cache(argument.name):
            continue
        for slice_of in (_inside, _inside_rows, _every_other):
            tried = list(changed)
            tried[place] = slice_of(value)
            try:
                is_same = kernels_of(OPS[op], tried) == keys
            except (TypeError, ValueError):
                is_same = False
            if is_same:
                changed, names = tried, [*names, argument.name]
                break
    return names, tuple(changed)


def _inside(value: torch.Tensor) -> torch.Tensor:
    """With rows before and behind, and 32 bytes on both sides of each."""
    edge = 32 // value.itemsize
    wide = _filled([size + 2 for size in value.shape[:-1]] + [value.shape[-1] + 2 * edge], value)
    return wide[(*(slice(1, -1) for _ in value.shape[:-1]), slice(edge, -edge))].copy_(value)


def _inside_rows(value: torch.Tensor) -> torch.Tensor:
    """In the order of its strides, with 64 bytes behind each dense row: for what has its rows along another axis."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    shape = [value.shape[axis] for axis in order]
    wide = _filled([*shape[:-1], shape[-1] + 64 // value.itemsize], value)[..., : shape[-1]]
    return wide.permute([order.index(axis) for axis in range(value.dim())]).copy_(value)


def _every_other(value: torch.Tensor) -> torch.Tensor:
    wide = _filled([*value.shape[:-1], 2 * value.shape[-1]], value)
    return wide[..., ::2].copy_(value)


def _filled(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(shape, dtype=like.dtype)
    verify.raw_memory(memory).fill_(0xFF)
    return memory


# ---- data ------------------------------------------------------------------------------------------------------------

BAD_NUMBERS = (-1, -7, -(2**31), 2**31 - 1, 2**20 + 1)
WIDE_NUMBERS = (2**31, 2**40, -(2**62))
"""Of int64."""

NO_NUMBERS_OF = ("scale",)
"""Ends of the names of integers that are data."""


def with_bad_numbers(op: str, args: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """The call with some, or all, numbers of one argument replaced by those that name nothing."""
    made = []
    for place, argument in enumerate(OPS[op].overload._schema.arguments):
        value = args[place]
        is_numbers = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
        if argument.alias_info is not None or not is_numbers or argument.name.endswith(NO_NUMBERS_OF):
            continue
        bad = torch.tensor(BAD_NUMBERS + (WIDE_NUMBERS if value.dtype == torch.int64 else ()), dtype=value.dtype)
        for share in (0.3, 1.0):
            g = torch.Generator().manual_seed(place)
            changed = list(verify.clone_arguments(args, CPU))
            others = bad[torch.arange(value.numel()) % len(bad)].view(value.shape)
            mask = torch.rand(value.shape, generator=g) < share
            changed[place].copy_(torch.where(mask, others, changed[place]))
            made.append((f"{argument.name} wrong by {share:.0%}", tuple(changed)))
    return made


def with_nan(op: str, args: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """The call with NaN in a few elements of one floating-point argument. Not of results as codes with tolerances: the
    scale of a block with a NaN is no number's, and tests of these ops have it. Nor of cached codes, which attention may
    take for numbers."""
    made: list[tuple[str, tuple[Any, ...]]] = []
    if op == "fused_q_kv_rmsnorm_quant" or "out_scale" in OPS[op].mutated(tuple(args)):
        return made
    for place, argument in enumerate(OPS[op].overload._schema.arguments):
        value = args[place]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
            continue
        if value.itemsize == 1 and op.startswith("sparse_mla") and argument.name.endswith("kv_cache"):
            continue
        g = torch.Generator().manual_seed(place)
        changed = list(verify.clone_arguments(args, CPU))
        mask = torch.rand(value.shape, generator=g) < 4 / value.numel()
        if value.itemsize == 1:
            codes = changed[place].view(torch.uint8)
            codes.copy_(torch.where(mask, 0x7F, codes))
        else:
            changed[place].copy_(torch.where(mask, torch.nan, changed[place]))
        made.append((f"NaN in {argument.name}", tuple(changed)))
    return made


# ---- memory that is not read -----------------------------------------------------------------------------------------

NAMING = (
    *("compress_norm_rope_store", "cp_gather_indexer_k_quant_cache", "dequantize_and_gather_k_cache"),
    *("fused_compress_norm_rope_store", "fused_qkv_insert_compress", "fused_qkv_insert_compress_index"),
    *("pack_records", "paged_mqa_logits", "score_top_k_decode", "sparse_mla_decode", "sparse_mla_mixed"),
    *("sparse_mla_prefill", "sparse_mla_prefill_paged", "top_k_per_row_decode", "top_k_per_row_prefill"),
)
"""Ops that read what slots, tables and lengths name."""


def with_nan_where_nothing_is_read(op: str, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The call, every record NaN that its reference does not read, and every score infinite that is outside its row.
    None: it reads all."""
    changed = verify.clone_arguments(args, CPU)
    if op.startswith("top_k"):
        given = dict(zip((a.name for a in OPS[op].overload._schema.arguments), changed, strict=True))
        scores = given["logits"]
        column = torch.arange(scores.shape[1])
        if op == "top_k_per_row_prefill":
            starts, ends = given["row_starts"], given["row_ends"]
        else:
            ends = given["seq_lens"].flatten()[: len(scores)]
            starts = torch.zeros_like(ends)
        outside = (column < starts[:, None]) | (column >= ends[:, None])
        scores[outside] = torch.inf
        return changed if bool(outside.any()) else None
    is_changed = False
    for memory, mask in unread(OPS[op], args, changed):
        memory[mask] = 0xFF
        is_changed |= bool(mask.any())
    return changed if is_changed else None


def unread(op: Op, args: Sequence[Any], others: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each pool that the reference reads records of: its memory among `others`, copies of `args`, and which bytes of
    that are of records that it does not read."""
    call = verify.clone_arguments(args, CPU)
    reads: dict[int, tuple[formats.KVFormat, torch.Tensor, int, set[int]]] = {}

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(fmt: Any, cache: torch.Tensor, block_size: int, slots: torch.Tensor, *more: Any) -> Any:
            known = reads.setdefault(cache.data_ptr(), (fmt, cache, block_size, set()))
            known[3].update(slots.flatten().tolist())
            return read(fmt, cache, block_size, slots, *more)

        return reading

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((formats.KVFormat, "read_fields"), (formats.CompressorStateFormat, "read")):
            patch.setattr(owner, name, watched(getattr(owner, name)))
        op.reference(*call)
    found = []
    for mine, other in zip(call, others, strict=True):
        if isinstance(mine, torch.Tensor) and mine.numel() and mine.data_ptr() in reads:
            fmt, cache, block_size, slots = reads.pop(mine.data_ptr())
            mask = torch.zeros(mine.untyped_storage().nbytes(), dtype=torch.uint8)
            never = torch.tensor([slot for slot in range(cache.shape[0] * block_size) if slot not in slots])
            pool = _view(mask, cache, cache.storage_offset())
            if isinstance(fmt, formats.CompressorStateFormat):
                ones = torch.full((len(never), fmt.row_elements), -1, dtype=torch.int32).view(torch.float32)
                fmt.write(pool, block_size, never, ones)
            else:
                widths = [width for _, width in fmt.fields(block_size)]
                ones = [torch.full((len(never), width), 0xFF, dtype=torch.uint8) for width in widths]
                fmt.write_fields(pool, block_size, never, *ones)
            found.append((verify.raw_memory(other), mask == 0xFF))
    return found
