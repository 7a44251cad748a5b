# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse_mla_decode, and what they mean: float64 on the device of the call, a batch at a time.

Pools are written and read byte by byte here, without the package's formats, selections and references. Every byte that
no call selects is poison: NaN codes, infinite scales, NaN in bf16.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_decode_workspace_size
from tests import oracle
from tests.gpu.decode_checks import BF16, FP8, MXFP8, MXFP8_SPLIT, NVFP4, NVFP4_SPLIT, assert_near, attention, same_bits
from tests.helpers import raw_bytes

DEVICE, IMPLEMENTATION = "cuda", "kernel"
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SCALE = 512**-0.5
SPLITS = ("num_splits", "split_tokens")
LISTS = ("indices", "length", "extra_indices", "extra_length", "table", "visible")
GUARD = 256
MOST_ROWS = 1 << 18
"""Cache rows held as float64 at a time: 1 GiB."""

LARGEST = 0.5
"""No value in a pool is larger. Rounding P to bf16 moves an output by 2^-8 of the mean magnitude of what it sums up at
most, and hardly ever by more than half of that, which `assert_near` allows by default, also where sums cancel."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@functools.cache
def _codes() -> torch.Tensor:
    """float64 value of each e4m3 code."""
    return torch.from_numpy(oracle.E4M3).to(DEVICE)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Pool:
    """Pages of records, and between them whatever `more_stride` adds; all bytes are `poison` until `put`.

    fp8_ds_mla: row o has 448 e4m3 codes and 64 bf16 values at o * 576, 7 scale exponents + 127 at rows * 576 + o * 8
    mxfp8_v41: row o has 512 e4m3 codes at o * 528, and behind them 16 scale exponents + 127
    nvfp4_v41: row o has 256 bytes of two e2m1 codes each at o * 288, and behind them 32 e4m3 scales
    mxfp8_v41_split, nvfp4_v41_split: the same codes at o * 512, o * 256, and the scales behind those of all rows
    plain_bf16: row o has 512 bf16 values at o * 1024
    """

    def __init__(self, kv_format: str, pages: int, rows: int, more_stride: int = 0, poison: int = 0xFF) -> None:
        self.kv_format, self.pages, self.rows, self.capacity = kv_format, pages, rows, pages * rows
        self.kind = {MXFP8_SPLIT: MXFP8, NVFP4_SPLIT: NVFP4}.get(kv_format, kv_format)
        width, scales = {FP8: (576, 8), MXFP8: (512, 16), NVFP4: (256, 32), BF16: (1024, 0)}[self.kind]
        self.size = 2 if kv_format == BF16 else 1
        record = width + scales
        self.stride = round_up(rows * record, 576 if kv_format == FP8 else 16) + more_stride
        self.bytes = torch.full((pages * self.stride,), poison, dtype=torch.uint8, device=DEVICE)
        view = (pages, rows, record // self.size)
        elements = self.bytes.view(torch.bfloat16) if kv_format == BF16 else self.bytes
        self.cache = elements.as_strided(view, (self.stride // self.size, view[2], 1))
        if kv_format in (MXFP8, NVFP4):
            at, steps = width, (record, record)
        else:
            at, steps = rows * width, (width, scales)
        self.data = self.bytes.as_strided((pages, rows, width), (self.stride, steps[0], 1))
        self.scales = self.data[..., :0]
        if scales:
            self.scales = self.bytes.as_strided((pages, rows, scales), (self.stride, steps[1], 1), at)

    def put(self, slots: torch.Tensor, seed: int = 0, largest: float = LARGEST) -> None:
        """Random records of values up to `largest` at the valid ones of `slots`, whatever its shape."""
        slots = torch.unique(slots.long())
        slots = slots[(slots >= 0) & (slots < self.capacity)]
        n, g = len(slots), generator(seed)

        def values(columns: int) -> torch.Tensor:
            return torch.randn(n, columns, device=DEVICE, generator=g).clamp_(-4, 4) * (largest / 4)

        if self.kv_format == FP8:
            # values of up to 4 times scales 2^-5 .. 2^-3
            codes = (values(448) * (4 / LARGEST)).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.randint(122, 125, (n, 8), device=DEVICE, generator=g, dtype=torch.uint8)
            scales[:, 7] = 0xFF  # the unused byte means nothing
            self.write(slots, torch.cat([codes, values(64).bfloat16().view(torch.uint8)], dim=1), scales)
        elif self.kind == MXFP8:
            codes = (values(512) * (4 / LARGEST)).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.randint(122, 125, (n, 16), device=DEVICE, generator=g, dtype=torch.uint8)
            self.write(slots, codes, scales)
        elif self.kind == NVFP4:
            # codes of up to 6 times scales 0 .. 2^-4 * 1.25, subnormal ones now and then
            codes = torch.randint(0, 256, (n, 256), device=DEVICE, generator=g, dtype=torch.uint8)
            scales = torch.randint(0, 0x1B, (n, 32), device=DEVICE, generator=g, dtype=torch.uint8)
            self.write(slots, codes, scales)
        else:
            self.write(slots, values(512).bfloat16().view(torch.uint8))

    def write(self, slots: torch.Tensor, data: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Store the bytes of records: data [n, width], and scales if the format has any."""
        page, row = slots // self.rows, slots % self.rows
        self.data[page, row] = data
        if scales is not None:
            self.scales[page, row] = scales

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """float64 [n, 512] of the records at valid slots."""
        page, row = slots // self.rows, slots % self.rows
        data, scales = self.data[page, row], self.scales[page, row]
        if self.kind == MXFP8:
            return _codes()[data.long()] * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
        if self.kind == NVFP4:
            nibbles = torch.stack([data & 15, data >> 4], dim=2).flatten(1).long()
            values = torch.from_numpy(oracle.E2M1).to(DEVICE)[nibbles & 7] * (1 - 2 * (nibbles >> 3))
            return values * _codes()[scales.long()].repeat_interleave(16, dim=1)
        if self.kv_format != FP8:
            return data.view(torch.bfloat16).double()
        factors = torch.exp2(scales[:, :7].double() - 127).repeat_interleave(64, dim=1)
        return torch.cat([_codes()[data[:, :448].long()] * factors, data[:, 448:].view(torch.bfloat16).double()], 1)


@dataclasses.dataclass
class Call:
    """Arguments of one call; `length` and `extra_length` belong to indices, `visible` to the block table."""

    q: torch.Tensor
    pool: Pool
    indices: torch.Tensor
    length: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    scale: float = SCALE
    extra: Pool | None = None
    extra_indices: torch.Tensor | None = None
    extra_length: torch.Tensor | None = None
    table: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    splits: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]

    def arguments(self) -> dict[str, Any]:
        """As `sparse_mla_decode` takes them, outputs aside."""
        return {
            "q": self.q,
            "k_cache": self.pool.cache,
            "indices": self.indices,
            "topk_length": self.length,
            "attn_sink": self.sink,
            "softmax_scale": self.scale,
            "kv_format": self.pool.kv_format,
            "extra_k_cache": None if self.extra is None else self.extra.cache,
            "extra_indices": self.extra_indices,
            "extra_topk_length": self.extra_length,
            "extra_block_table": self.table,
            "extra_length": self.visible,
            "extra_kv_format": FP8 if self.extra is None else self.extra.kv_format,
            **self.splits,
        }

    def take(self, rows: Any) -> Call:
        """The call for some of the batch alone: an index of the batch dimension."""
        per_row = ("q", "indices", "length", "extra_indices", "extra_length", "table", "visible")
        given = {name: getattr(self, name) for name in per_row}
        return dataclasses.replace(self, **{k: None if v is None else v[rows] for k, v in given.items()})

    def tokens(self, tokens: slice) -> Call:
        """The call for some of each request's tokens alone."""
        per_token = ("q", "indices", "length", "extra_indices", "extra_length", "visible")
        given = {name: getattr(self, name) for name in per_token}
        taken = {k: v if v is None or v.dim() == 1 else v[:, tokens] for k, v in given.items()}
        return dataclasses.replace(self, **taken)

    def slots(self) -> Iterator[tuple[Pool, torch.Tensor]]:
        """Per list its pool and int64 [b, s_q, columns], -1 where a column names nothing."""
        yield self.pool, self._valid(self.pool, self.indices.long(), self.length)
        if self.extra is None:
            return
        if self.extra_indices is not None:
            yield self.extra, self._valid(self.extra, self.extra_indices.long(), self.extra_length)
            return
        assert self.table is not None
        row = torch.arange(self.extra.rows, device=DEVICE)
        page = self.table.long()[:, None, :, None].expand(-1, self.rows[1], -1, -1)
        slots = (page * self.extra.rows + row).where((page >= 0) & (page < self.extra.pages), -1)
        yield self.extra, self._valid(self.extra, slots.flatten(2), self.visible)

    def _valid(self, pool: Pool, slots: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        named = (slots >= 0) & (slots < pool.capacity)
        if lengths is not None:
            by_row = lengths if lengths.dim() == 2 else lengths[:, None]
            named &= torch.arange(slots.shape[2], device=DEVICE) < by_row[:, :, None]
        return slots.where(named, -1)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out [b, s_q, h, 512] and lse [b, h, s_q]."""
        lists = [(pool, slots.flatten(0, 1)) for pool, slots in self.slots()]
        q = self.q.flatten(0, 1).double()
        step = max(1, MOST_ROWS // max(1, sum(slots.shape[1] for _, slots in lists)))
        outs, lses = [q[:0]], [q[:0, :, 0]]
        for first in range(0, len(q), step):
            rows = slice(first, first + step)
            k, named = zip(*(_records(pool, slots[rows]) for pool, slots in lists), strict=True)
            out, lse = attention(q[rows], torch.cat(k, dim=1), torch.cat(named, dim=1), self.scale, self.sink)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs), torch.cat(lses)
        return out.view(self.q.shape), lse.view(self.q.shape[:3]).transpose(1, 2)


def _records(pool: Pool, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [n, columns, 512], zero at -1, and which are not. A record named often is read once."""
    named = slots >= 0
    distinct, inverse = torch.unique(slots[named], return_inverse=True)
    k = torch.zeros(*slots.shape, 512, dtype=torch.float64, device=DEVICE)
    k[named] = pool.read(distinct)[inverse]
    return k, named


def random_lengths(form: str, b: int, s_q: int, columns: int, seed: int) -> torch.Tensor | None:
    """None, [b] or [b, s_q]: around tiles, nothing, everything, less than nothing and more than there is."""
    if form == "none":
        return None
    odd = int32([columns, 0, 1, 63, 64, 65, columns - 1, -1, columns + 1, INT_MIN, INT_MAX, 127, 128])
    shape = (b,) if form == "b" else (b, s_q)
    lengths = torch.randint(0, columns + 1, shape, device=DEVICE, generator=generator(seed)).int()
    chosen = odd[torch.randint(0, len(odd), shape, device=DEVICE, generator=generator(seed + 1))]
    return lengths.where(torch.rand(shape, device=DEVICE, generator=generator(seed + 2)) < 0.5, chosen)


def random_indices(pool: Pool, shape: tuple[int, ...], bad: float, seed: int) -> torch.Tensor:
    """Slots, now and then one twice, with a share of values that are no slots."""
    slots = torch.randint(0, pool.capacity, shape, device=DEVICE, generator=generator(seed)).int()
    none = int32([-1, INT_MIN, INT_MAX, pool.capacity, -pool.capacity, -7])
    chosen = none[torch.randint(0, len(none), shape, device=DEVICE, generator=generator(seed + 1))]
    return slots.where(torch.rand(shape, device=DEVICE, generator=generator(seed + 2)) >= bad, chosen)


def random_sink(form: str, heads: int) -> torch.Tensor | None:
    """None, or one value for all heads, or of every kind in turn."""
    values = {"minus": [-math.inf], "plus": [math.inf], "finite": [1.25], "mixed": [-math.inf, 0.5, math.inf, 3, -20]}
    if form == "none":
        return None
    return torch.tensor(values[form], device=DEVICE).repeat(heads)[:heads].contiguous()


def make(
    b: int = 3,
    s_q: int = 1,
    heads: int = 64,
    topk: int = 128,
    rows: int = 64,
    kv_format: str = FP8,
    second: str = "none",
    extra_topk: int = 200,
    extra_rows: int = 64,
    extra_format: str = FP8,
    lengths: str = "none",
    bad: float = 0.1,
    sink: str = "mixed",
    more_stride: int = 0,
    poison: int = 0xFF,
    seed: int = 0,
    **splits: int,
) -> Call:
    """A random call. `second`: "none", "listed", or "dense", which has the pages that extra_topk entries need.

    Heads have queries of very different sizes: softmax is flat in some and close to one key in others.
    """

    def pool(fmt: str, of: int, columns: int) -> Pool:
        return Pool(fmt, max(3, -(-2 * columns // of)), of, more_stride, poison)

    g = generator(seed)
    exponents = torch.randint(-4, 7, (b, s_q, heads, 1), device=DEVICE, generator=g)
    q = torch.randn(b, s_q, heads, 512, device=DEVICE, generator=g) * torch.exp2(exponents.float())
    first = pool(kv_format, rows, topk)
    call = Call(
        q.bfloat16(),
        first,
        random_indices(first, (b, s_q, topk), bad, seed + 1),
        random_lengths(lengths, b, s_q, topk, seed + 2),
        random_sink(sink, heads),
        splits=splits,
    )
    if second != "none":
        call.extra = pool(extra_format, extra_rows, extra_topk)
    if second == "listed":
        call.extra_indices = random_indices(call.extra, (b, s_q, extra_topk), bad, seed + 3)
        call.extra_length = random_lengths(lengths, b, s_q, extra_topk, seed + 4)
    if second == "dense":
        width = -(-extra_topk // extra_rows)
        call.table = random_indices(Pool(extra_format, call.extra.pages, 1), (b, width), bad, seed + 3)
        call.visible = random_lengths("bs", b, s_q, extra_topk, seed + 4)
    fill(call)
    return call


def fill(call: Call) -> None:
    """Give every slot that the call selects a record."""
    for seed, (pool, slots) in enumerate(call.slots()):
        pool.put(slots, seed)


def workspace_for(call: Call) -> torch.Tensor:
    """What the call may need of it, all NaN, in the midst of a larger tensor whose ends must stay as they are."""
    extra = 0 if call.extra_indices is None else call.extra_indices.shape[2]
    if call.extra is not None and call.table is not None:
        extra = call.table.shape[1] * call.extra.rows
    shape = *call.q.shape[:3], call.indices.shape[2], extra
    size = sparse_mla_decode_workspace_size(*shape, **call.splits, device=DEVICE)
    return torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)[GUARD:-GUARD]


def run(call: Call, dtype: torch.dtype = torch.bfloat16, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the call's kernel, over poison. `more` replaces arguments, outputs and workspace too."""
    call = dataclasses.replace(call, splits={k: more.pop(k) for k in SPLITS if k in more} or call.splits)
    b, s_q, heads, _ = call.q.shape
    outputs = {
        "out": torch.full((b, s_q, heads, 512), math.nan, dtype=dtype, device=DEVICE),
        "lse": torch.full((b, heads, s_q), math.nan, device=DEVICE),
        "workspace": workspace_for(call),
        **more,
    }
    with record_calls() as recording:
        sparse_mla_decode(**call.arguments(), **outputs)
    assert [done.implementation for done in recording.calls] == [IMPLEMENTATION]
    if "workspace" not in more:
        around = raw_bytes(outputs["workspace"])
        assert bool((around[:GUARD] == 0xFF).all() & (around[-GUARD:] == 0xFF).all())
    return outputs["out"], outputs["lse"]


def check(call: Call, dtype: torch.dtype = torch.bfloat16, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the call, compare with what it means, and return (out, lse)."""
    got = run(call, dtype, **more)
    assert_near(got, call.expected())
    return got


def check_constant_lists(constant: int, **shape: Any) -> None:
    """A kernel may read them before the one ahead of it has ended, if that one does not write them: between two calls
    come copies, which let nothing begin early, and between copies and the last call of each two another call. All give
    the bits of calls that read nothing early, the last of which is compared with what it means."""
    shape = {"lengths": "bs", **shape}
    call = make(**shape)
    others = [make(seed=seed, **shape) for seed in range(1, 7)]
    variants = [dataclasses.replace(call, **{name: getattr(other, name) for name in LISTS}) for other in others]
    copies = {name: None if (values := getattr(call, name)) is None else values.clone() for name in LISTS}
    given = dataclasses.replace(call, **copies)
    for variant in variants:
        fill(variant)
    want = [run(variant) for variant in variants]
    assert_near(want[-1], variants[-1].expected())
    got = [[tuple(torch.full_like(t, math.nan) for t in results) for results in want] for _ in range(2)]
    workspace = workspace_for(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for variant, *results in zip(variants, *got, strict=True):
            for name in LISTS:
                if (values := getattr(variant, name)) is not None:
                    getattr(given, name).copy_(values)
            for out, lse in results:
                memory = {"out": out, "lse": lse, "workspace": workspace}
                sparse_mla_decode(**given.arguments(), **memory, constant_lists=constant)
    for _ in range(20):
        graph.replay()
        for results in got:
            assert all(same_bits(g, w) for g, w in zip(results, want, strict=True))
            for t in itertools.chain(*results):
                t.fill_(math.nan)


def inside(t: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
    """A copy of `t` in the midst of a larger tensor, of NaN or of the largest integer."""
    sizes = [a + n + z for a, n, z in zip(before, t.shape, after, strict=True)]
    nothing = math.nan if t.is_floating_point() else INT_MAX
    whole = torch.full(sizes, nothing, dtype=t.dtype, device=t.device)
    view = whole[tuple(slice(a, a + n) for a, n in zip(before, t.shape, strict=True))]
    return view.copy_(t)
