# SPDX-License-Identifier: Apache-2.0
"""Calls of the ops that score: their arguments by name, what they are to the kernels, and what is launched for them.

score_top_k_prefill and score_top_k_decode run, chunk after chunk, the kernel of mqa_logits or paged_mqa_logits, then
that of the picks. Nothing but the order of the launches makes a chunk's picks wait for its scores, and the next chunk's
scores for these picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer import chunks, select, topk_select
from cute_kernels.indexer.hopper.logits import LogitsKey
from cute_kernels.indexer.mma_sync.logits import PortableLogitsKey
from cute_kernels.indexer.params import KEY_TILE
from cute_kernels.indexer.topk_select import decode_bounds, prefill_bounds, slots
from cute_kernels.runtime.arch import arch_of, grid_size, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel


@dataclass
class LogitsCall:
    """mqa_logits: the arguments in the schema's order, checked. All rows are one request's, all keys one page's, of as
    many as kernels are chosen by."""

    paged: ClassVar[bool] = False
    requests: ClassVar[int] = 1
    page_rows: ClassVar[int] = KEY_TILE

    q: Any
    q_scale: Any
    k: Any
    k_scale: Any
    weights: Any
    cu_seq_len_k_start: Any
    cu_seq_len_k_end: Any
    clean_logits: bool
    max_seqlen_k: int
    out: Any

    @property
    def rows(self) -> int:
        return int(self.q.shape[0])

    def why_not(self) -> str:
        """Why no kernel can take the call; empty if one can."""
        keys = self.k.shape[0]
        why = why_not(self.q, self.k, "kv[0]", self.out)
        return why or (f"there must be fewer than 2^31 - 256 keys, got {keys}" if keys > 2**31 - 256 else "")

    def query_strides(self) -> tuple[int, int, int]:
        """In elements: by request, row and head."""
        by_row = stride(self.q, 0)
        return by_row * self.rows, by_row, stride(self.q, 1)

    def cache_arguments(self) -> tuple[Any, ...]:
        """Where keys are: addresses of key 0 and its scale, strides of keys and pages in bytes; keys of a page, pages;
        address of the block table, its stride in bytes and its columns."""
        keys, by_key = self.k.shape[0], stride(self.k, 0)
        return (self.k.data_ptr(), self.k_scale.data_ptr(), by_key, by_key * keys, keys, 1, 0, 0, 0)

    def window_arguments(self, skip: int) -> tuple[Any, ...]:
        """Which keys a row sees: addresses of starts and ends, stride of the ends by request in bytes; number of keys,
        whether a row's columns begin at its start (-1) or not (0), keys up to which a row is not scored."""
        starts, ends = self.cu_seq_len_k_start.data_ptr(), self.cu_seq_len_k_end.data_ptr()
        return (starts, ends, 0, self.k.shape[0], -1 if self.max_seqlen_k > 0 else 0, skip)


@dataclass
class PagedLogitsCall:
    """paged_mqa_logits: the arguments in the schema's order, checked. A page has all codes, then all scales."""

    paged: ClassVar[bool] = True

    q: Any
    q_scale: Any
    kv_cache: Any
    weights: Any
    context_lens: Any
    block_tables: Any
    max_model_len: int
    clean_logits: bool
    kv_format: str
    out: Any

    @property
    def requests(self) -> int:
        return int(self.q.shape[0])

    @property
    def rows(self) -> int:
        return int(self.q.shape[1])

    @property
    def page_rows(self) -> int:
        return int(self.kv_cache.shape[1])

    def why_not(self) -> str:
        """Why no kernel can take the call; empty if one can."""
        keys, page_rows = self.max_model_len, self.page_rows
        why = why_not(self.q, self.kv_cache, "kv_cache", self.out)
        if not why and max(keys, page_rows) > 2**31 - 256:
            why = f"there must be fewer than 2^31 - 256 keys, got {keys}, and {page_rows} in a page"
        return why

    def query_strides(self) -> tuple[int, int, int]:
        return stride(self.q, 0), stride(self.q, 1), stride(self.q, 2)

    def cache_arguments(self) -> tuple[Any, ...]:
        pool, table = self.kv_cache, self.block_tables
        size = INDEX_DIM if self.q_scale is None else INDEX_DIM // 2
        pages, page_rows = pool.shape[:2]
        codes = pool.data_ptr()
        in_pages = (codes, codes + page_rows * size, size, stride(pool, 0), page_rows, pages)
        return (*in_pages, table.data_ptr(), table.stride(0) * 4, table.shape[1])

    def window_arguments(self, skip: int) -> tuple[Any, ...]:
        lengths = self.context_lens
        return (0, lengths.data_ptr(), lengths.stride(0) * 4, self.out.shape[1], 0, skip)


def launch_call(call: LogitsCall | PagedLogitsCall, op: str, skip: int) -> None:
    """Run a kernel on the current stream of out's device, for an op, on a call that has keys and scores. Rows that see
    no more than `skip` keys are not scored."""
    device_index = call.out.device.index
    arch, heads, mxfp4 = arch_of(device_index), call.q.shape[-2], call.q_scale is not None
    if select.has_own(arch, heads, call.page_rows) and select.is_safe(op, arch, device_index):
        key: Any = select.own_key(arch, heads, call.rows, call.paged, call.page_rows, mxfp4)
    else:
        key = select.portable_key(arch, heads, call.rows, call.paged, mxfp4)
    ctas = grid_size(select.ctas(key, call.requests, call.rows, call.out.shape[1], multiprocessors(device_index)))
    keys_and_windows = (*call.cache_arguments(), *call.window_arguments(skip))
    clean = int(call.clean_logits)
    if isinstance(key, PortableLogitsKey):
        queries = (*code_strides(call.q, call.rows), *(code_strides(call.q_scale, call.rows) if mxfp4 else (0,) * 4))
        numbers = (*queries, call.requests, call.rows, heads, *keys_and_windows, clean)
    else:
        rows = (call.q.data_ptr(), *call.query_strides(), call.requests, call.rows)
        numbers = (*rows, *keys_and_windows, clean, *scale_arguments(key, call.q_scale))
    launch_key(key, device_index, call.weights, call.out, *numbers, ctas)


def why_not(q: Any, keys: Any, what: str, out: Any) -> str:
    """Why no kernel can take a call's (checked) queries, keys (named `what`) and scores; empty if one can."""
    heads = q.shape[-2]
    if not 0 < heads <= select.MOST_HEADS:
        return f"HI must be at least 1 and at most {select.MOST_HEADS}, got {heads}"
    for name, tensor, axes in (("q", q, range(q.dim() - 1)), (what, keys, range(0, keys.dim() - 1, keys.dim() - 1))):
        strides = [tensor.stride(axis) for axis in axes if tensor.shape[axis] > 1]
        if tensor.data_ptr() % 16 or any(stride % 16 or not 0 <= stride < 2**40 for stride in strides):
            return (
                f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if out.shape[0] * (out.shape[1] // KEY_TILE + 2) >= 2**31:
        return f"there must be fewer than 2^31 tiles of {KEY_TILE} scores, got out of shape {list(out.shape)}"
    return ""


def stride(tensor: Any, axis: int) -> int:
    """In elements; of an axis with one element, what a dense tensor would have: nobody uses it."""
    return int(tensor.stride(axis)) if tensor.shape[axis] > 1 else max(1, int(tensor.numel())) * INDEX_DIM


def code_strides(tensor: Any, rows: int) -> tuple[int, int, int, int]:
    """Of mma_sync/logits: address of codes or scales of queries, and their strides in bytes by request, row and head.
    Without requests, all rows are one's. The last axis of codes is dense."""
    size = tensor.element_size()
    axes = tensor.stride()[:-1] if size == 1 else tensor.stride()
    row, head = axes[-2] * size, axes[-1] * size
    return tensor.data_ptr(), axes[0] * size if len(axes) == 3 else row * rows, row, head


def scale_arguments(key: Any, q_scale: Any) -> tuple[int, ...]:
    """What hopper/logits_mxfp4 and blackwell/logits take more than hopper/logits: address of the queries' scales
    [..., row, head] and strides in bytes, by request, if there are several, and row. Zeros where `q_scale` is None."""
    if isinstance(key, LogitsKey):
        return ()
    if q_scale is None:
        return 0, 0, 0
    strides = [q_scale.stride(axis) * q_scale.element_size() for axis in range(q_scale.dim() - 1)]
    return q_scale.data_ptr(), *([0] * (2 - len(strides))), *strides


# ---- mqa_logits


def logits_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One for each format: a prefill may have any number of rows. Every rank has all index heads."""
    return select.deployment_keys(config, arch, paged=False)


def supports_logits(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    why = LogitsCall(*args).why_not()
    return not why, why


def launch_logits(*args: Any, skip: int = 0, op: str = "mqa_logits") -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    run_logits(LogitsCall(*args), skip, op)


def run_logits(call: LogitsCall, skip: int, op: str) -> None:
    """The same for an op. Rows that see no more than `skip` keys are not scored."""
    if call.out.numel() == 0:
        return
    if call.k.shape[0] == 0:
        if call.clean_logits:
            call.out.fill_(float("-inf"))
        return
    launch_call(call, op, skip)


MQA_LOGITS = OpKernel(launch_logits, supports_logits, logits_keys)


# ---- paged_mqa_logits


def paged_logits_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One of each format for every size of a group, on pages of 64 keys. Every rank has all index heads."""
    return select.deployment_keys(config, arch, paged=True)


def supports_paged_logits(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    why = PagedLogitsCall(*args).why_not()
    return not why, why


def launch_paged_logits(*args: Any, skip: int = 0, op: str = "paged_mqa_logits") -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    run_paged_logits(PagedLogitsCall(*args), skip, op)


def run_paged_logits(call: PagedLogitsCall, skip: int, op: str) -> None:
    """The same for an op. Rows that see no more than `skip` keys are not scored."""
    if call.out.numel() == 0:
        return
    if call.kv_cache.shape[0] == 0 or call.block_tables.shape[1] == 0:
        call.out.fill_(float("-inf"))
        return
    launch_call(call, op, skip)


PAGED_MQA_LOGITS = OpKernel(launch_paged_logits, supports_paged_logits, paged_logits_keys)


# ---- score_top_k_prefill


class ScoreTopKPrefillCall(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    q_scale: Any
    k: Any
    k_scale: Any
    weights: Any
    start: Any
    end: Any
    max_seqlen_k: int
    out: Any
    workspace: Any

    @property
    def columns(self) -> int:
        return self.max_seqlen_k if self.max_seqlen_k > 0 else int(self.k.shape[0])

    def walk(self) -> Any:
        return chunks.walk(self.workspace, self.q.shape[0], self.columns, 1, self.out, self.weights.dtype)

    def rows(self, first: int, last: int) -> ScoreTopKPrefillCall:
        """The call of some rows."""
        if last - first == self.q.shape[0]:
            return self
        rows = slice(first, last)
        cut = {name: getattr(self, name)[rows] for name in ("q", "weights", "start", "end", "out")}
        return self._replace(q_scale=None if self.q_scale is None else self.q_scale[rows], **cut)

    def scores(self, out: Any) -> LogitsCall:
        """The call of mqa_logits."""
        keys = self.k, self.k_scale
        return LogitsCall(
            self.q, self.q_scale, *keys, self.weights, self.start, self.end, False, self.max_seqlen_k, out
        )


def score_top_k_prefill_keys(config: Any, tp: int, arch: str) -> list[Any]:
    """Those of scores and picks, where there are scores."""
    keys = logits_keys(config, tp, arch)
    return [*keys, *topk_select.deployment_keys(config, tp, arch)] if keys else []


def supports_score_top_k_prefill(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    call = ScoreTopKPrefillCall(*args)
    for first, last, scores, _ in call.walk():
        why = call.rows(first, last).scores(scores).why_not()
        return (False, why) if why else topk_select.check(scores, last - first, call.out.shape[1])
    return True, ""


def launch_score_top_k_prefill(*args: Any) -> None:
    """Run the kernels on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    call = ScoreTopKPrefillCall(*args)
    k, shifts = call.out.shape[1], -1 if call.max_seqlen_k > 0 else 0
    for first, last, scores, is_scored in call.walk():
        part = call.rows(first, last)
        if is_scored:
            run_logits(part.scores(scores), skip=k, op="score_top_k_prefill")
        starts, ends = prefill_bounds(part.start, part.end)
        topk_select.run(scores, starts, ends, part.out, last - first, k, call.k.shape[0], shifts)


SCORE_TOP_K_PREFILL = OpKernel(launch_score_top_k_prefill, supports_score_top_k_prefill, score_top_k_prefill_keys)


# ---- score_top_k_decode


class ScoreTopKDecodeCall(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    q_scale: Any
    kv_cache: Any
    weights: Any
    context_lens: Any
    block_tables: Any
    max_model_len: int
    kv_format: str
    out: Any
    workspace: Any
    slot_block_table: Any
    slot_rows_per_page: int

    def walk(self) -> Any:
        requests, next_n = self.q.shape[:2]
        return chunks.walk(self.workspace, requests, self.max_model_len, next_n, self.out, self.weights.dtype)

    def requests(self, first: int, last: int) -> ScoreTopKDecodeCall:
        """The call of some requests."""
        requests, next_n = self.q.shape[:2]
        if last - first == requests:
            return self
        own, rows = slice(first, last), slice(first * next_n, last * next_n)
        cut = {name: getattr(self, name)[own] for name in ("q", "context_lens", "block_tables")}
        cut |= {name: getattr(self, name)[rows] for name in ("weights", "out")}
        optional = {name: getattr(self, name) for name in ("q_scale", "slot_block_table")}
        cut |= {name: None if value is None else value[own] for name, value in optional.items()}
        return self._replace(**cut)

    def scores(self, out: Any) -> PagedLogitsCall:
        """The call of paged_mqa_logits."""
        cache = self.kv_cache, self.weights, self.context_lens, self.block_tables, self.max_model_len
        return PagedLogitsCall(self.q, self.q_scale, *cache, False, self.kv_format, out)


def score_top_k_decode_keys(config: Any, tp: int, arch: str) -> list[Any]:
    """Those of scores and picks, where there are scores."""
    keys = paged_logits_keys(config, tp, arch)
    return [*keys, *topk_select.deployment_keys(config, tp, arch)] if keys else []


def supports_score_top_k_decode(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    call = ScoreTopKDecodeCall(*args)
    for first, last, scores, _ in call.walk():
        why = call.requests(first, last).scores(scores).why_not()
        return (False, why) if why else topk_select.check(scores, scores.shape[0], call.out.shape[1])
    return True, ""


def launch_score_top_k_decode(*args: Any) -> None:
    """Run the kernels on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    call = ScoreTopKDecodeCall(*args)
    k = call.out.shape[1]
    for first, last, scores, is_scored in call.walk():
        part = call.requests(first, last)
        if is_scored:
            run_paged_logits(part.scores(scores), skip=k, op="score_top_k_decode")
        starts, ends = decode_bounds(part.context_lens)
        places = slots(part.slot_block_table, part.slot_rows_per_page)
        topk_select.run(scores, starts, ends, part.out, scores.shape[0], k, slots=places)


SCORE_TOP_K_DECODE = OpKernel(launch_score_top_k_decode, supports_score_top_k_decode, score_top_k_decode_keys)
