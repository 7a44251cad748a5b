# SPDX-License-Identifier: Apache-2.0
"""Byte layouts of every cache record, each behind a versioned id.

A cache is a strided view over raw pages. Inside a page everything is dense; `stride(0)`, the page stride, is read from
the tensor and may exceed the natural page size: every op takes any that holds a page. Kernels ask for pages at
multiples of 16 bytes (inserts and gathers of 8), Blackwell's own for fp8_ds_mla pages at multiples of 576. Each format
knows its sizes and offsets, allocates pools, checks a cache tensor that claims to have it, and moves records in and
out: `write` and `read` are the reference meaning of the bytes.

A slot is a row number over the whole pool, page * block_size + row, int64. `write` skips slots outside the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cute_kernels import numerics
from cute_kernels.runtime.checks import Checker

HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM
INDEX_DIM = 128


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def valid_slots(slots: torch.Tensor, capacity: int) -> torch.Tensor:
    """bool mask of the slots that name a row of a cache with `capacity` rows."""
    return (slots >= 0) & (slots < capacity)


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """What all record formats share.

    id            name and version of the byte layout; part of every compile key
    dim           values in a record
    row_elements  width of the cache tensor's last dimension (a shape carrier: bytes, or elements of a plain cache)
    alignment     page strides this project allocates are multiples of it, in bytes
    encode        rows [n, dim] -> what the record holds; every format that converts has its own
    decode        the inverse of encode
    """

    id: str
    dim: int
    row_elements: int
    dtype: torch.dtype
    alignment: int
    encode: ClassVar[Callable[..., Any]]
    decode: ClassVar[Callable[..., Any]]

    def page_bytes(self, block_size: int) -> int:
        """Natural size of a page of `block_size` rows."""
        return block_size * self.row_elements * self.dtype.itemsize

    def page_stride(self, block_size: int) -> int:
        """Bytes from page to page in a pool of this project: the natural size rounded up to `alignment`."""
        return round_up(self.page_bytes(block_size), self.alignment)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        page_stride: int | None = None,
    ) -> torch.Tensor:
        """A zeroed pool, shape [num_blocks, block_size, row_elements], strides (page stride, row_elements, 1).

        page_stride   bytes from page to page, at least `page_bytes(block_size)`; default `page_stride(block_size)`
        """
        stride = self.page_stride(block_size) if page_stride is None else page_stride
        size = self.dtype.itemsize
        if stride < self.page_bytes(block_size) or stride % size:
            least = self.page_bytes(block_size)
            raise ValueError(
                f"{self.id}: page_stride: expected a multiple of {size} of at least {least} bytes, got {stride}"
            )
        pool = torch.zeros(num_blocks, stride // size, dtype=self.dtype, device=device)
        return pool.as_strided((num_blocks, block_size, self.row_elements), (stride // size, self.row_elements, 1))

    def clone(self, cache: torch.Tensor) -> torch.Tensor:
        """A copy of a pool with the page stride that it has: `cache.clone()` drops what lies between pages."""
        stride = max(cache.stride(0), cache.shape[1] * cache.stride(1))
        pool = torch.zeros(cache.shape[0], stride, dtype=cache.dtype, device=cache.device)
        return pool.as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache)

    @property
    def name(self) -> str:
        """Of the format in this module."""
        return next((f"formats.{name}" for name, value in globals().items() if value is self), self.id)

    def check(self, c: Checker, argument: str, cache: Any, block_size: int | None = None) -> None:
        """Check that `cache` can hold pages of this format: dtype, shape, strides, and its block size if given."""
        c.tensor(argument, cache, self.dtype, (None, None, self.row_elements))
        rows = cache.shape[1]
        if block_size is not None and rows != block_size:
            c.fail(argument, f"pages of {block_size} rows", f"shape {list(cache.shape)}")
        if rows > 1 and cache.stride(1) != self.row_elements:
            rows = f"rows {self.row_elements} elements apart, as {self.name}.allocate and .clone make them"
            c.fail(argument, rows, f"strides {tuple(cache.stride())}")
        self._check_page_stride(c, argument, cache, rows * self.row_elements)

    def _check_page_stride(self, c: Checker, argument: str, cache: torch.Tensor, least: Any) -> None:
        if cache.shape[0] > 1 and cache.stride(0) < least:
            pages = f"pages at least {least} elements apart, as {self.name}.allocate and .clone make them"
            c.fail(argument, pages, f"strides {tuple(cache.stride())}")

    def pages(self, cache: torch.Tensor, block_size: int) -> torch.Tensor:
        """The pool as raw pages, uint8 [num_blocks, page_bytes] over the same memory."""
        size = self.page_bytes(block_size) // self.dtype.itemsize
        return cache.as_strided((cache.shape[0], size), (cache.stride(0), 1)).view(torch.uint8)

    def fields(self, block_size: int) -> tuple[tuple[int, int], ...]:
        """(offset of row 0 in the page, bytes per row) of each dense field of a record."""
        return ((0, self.row_elements * self.dtype.itemsize),)

    @property
    def record_bytes(self) -> int:
        """Of a record by itself: its fields one behind the other."""
        return sum(width for _, width in self.fields(1))

    def _cells(self, slots: torch.Tensor, block_size: int, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        offset, width = self.fields(block_size)[field]
        page = torch.div(slots, block_size, rounding_mode="floor")
        column = offset + (slots % block_size)[:, None] * width + torch.arange(width, device=slots.device)
        return page[:, None], column

    def write_fields(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor, *fields: torch.Tensor) -> None:
        """Store the raw bytes of records at `slots`; records whose slot lies outside the pool are skipped."""
        slots = slots.long()
        keep = valid_slots(slots, cache.shape[0] * block_size)
        pages = self.pages(cache, block_size)
        for number, data in enumerate(fields):
            pages[self._cells(slots[keep], block_size, number)] = data[keep].contiguous().view(torch.uint8)

    def read_fields(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Raw bytes of the records at `slots`, one uint8 tensor per field. Every slot must lie inside the pool."""
        slots = slots.long()
        pages = self.pages(cache, block_size)
        return tuple(pages[self._cells(slots, block_size, n)] for n in range(len(self.fields(block_size))))

    def write(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode rows [n, dim] into the records at `slots`; those whose slot lies outside the pool are skipped."""
        self.write_fields(cache, block_size, slots, *self.encode(rows))

    def read(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor) -> torch.Tensor:
        """The decoded rows [n, dim] at `slots`. Every slot must lie inside the pool."""
        return self.decode(*self.read_fields(cache, block_size, slots))


@dataclass(frozen=True, kw_only=True)
class Fp8DsMlaFormat(KVFormat):
    """fp8_ds_mla: a page of bs rows holds all data, then all scales.

        byte   0                448              576
        row o  | 448 x e4m3      | 64 x bf16 rope |        at o * 576
        byte   0                          7       8
        scale  | 7 x ue8m0, per 64 columns | 0    |        at bs * 576 + o * 8

    value = e4m3 * 2^(byte - 127), exact in bf16. Natural page bs * 584 bytes, stride rounded up to 576 (64 rows:
    37440). The tensor view [num_blocks, bs, 584] carries shape and page stride only; its rows are not the records.
    """

    id: str = "fp8_ds_mla/1"
    dim: int = HEAD_DIM
    row_elements: int = 584
    dtype: torch.dtype = torch.uint8
    alignment: int = 576
    data_bytes: int = 576
    scale_bytes: int = 8
    quant_block: int = 64

    def check(self, c: Checker, argument: str, cache: Any, block_size: int | None = None) -> None:
        """As the base class; with a known block size the flat view [num_blocks, bytes] is accepted too."""
        if block_size is None or not isinstance(cache, torch.Tensor) or cache.dim() != 2:
            super().check(c, argument, cache, block_size)
            return
        c.tensor(argument, cache, self.dtype, (None, None))
        if cache.shape[1] < self.page_bytes(block_size):
            c.fail(argument, f"pages of at least {self.page_bytes(block_size)} bytes", f"shape {list(cache.shape)}")
        self._check_page_stride(c, argument, cache, self.page_bytes(block_size))

    def fields(self, block_size: int) -> tuple[tuple[int, int], ...]:
        return ((0, self.data_bytes), (block_size * self.data_bytes, self.scale_bytes))

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 [n, 512], already rotated -> (data uint8 [n, 576], scales uint8 [n, 8])."""
        codes, scale = numerics.quantize_e4m3(rows[:, :NOPE_DIM], self.quant_block)
        rope = rows[:, NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat([codes, rope], dim=1), torch.nn.functional.pad(scale, (0, 1))

    def decode(self, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Inverse of `encode`: bf16 [n, 512]."""
        nope = numerics.dequantize_e4m3(data[:, :NOPE_DIM], scales[:, :7]).to(torch.bfloat16)
        return torch.cat([nope, data[:, NOPE_DIM:].contiguous().view(torch.bfloat16)], dim=1)


@dataclass(frozen=True, kw_only=True)
class V41Format(KVFormat):
    """What records of V4.1's own share: 512 columns in codes, rotated ones included, and one scale for a few.

        interleaved   row o  | codes | scales |    at o * (data_bytes + scale_bytes)
        split         row o  | codes |             at o * data_bytes
                      scale  | scales |            at bs * data_bytes + o * scale_bytes

    Both take as many bytes, and no width tells them apart: they are formats of their own. Interleaved pages have no
    padding; strides of split ones are rounded up to 512.
    """

    dim: int = HEAD_DIM
    dtype: torch.dtype = torch.uint8
    data_bytes: int
    scale_bytes: int
    quant_block: int
    is_split: bool = False

    def fields(self, block_size: int) -> tuple[tuple[int, int], ...]:
        if not self.is_split:
            return super().fields(block_size)
        return ((0, self.data_bytes), (block_size * self.data_bytes, self.scale_bytes))

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """bf16 [n, 512], already rotated -> (codes uint8 [n, data_bytes], scales uint8 [n, scale_bytes]), interleaved
        as one."""
        parts = self.quantize(rows)
        return parts if self.is_split else (torch.cat(parts, dim=1),)

    def decode(self, *fields: torch.Tensor) -> torch.Tensor:
        """Inverse of `encode`: bf16 [n, 512]."""
        codes, scales = fields if self.is_split else fields[0].split([self.data_bytes, self.scale_bytes], dim=1)
        return self.dequantize(codes.contiguous(), scales.contiguous()).to(torch.bfloat16)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of rows."""
        raise NotImplementedError

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Rows of (codes, scales), exact in bf16."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Mxfp8V41Format(V41Format):
    """V4.1's rows in MXFP8.

        byte   0                                                     512            528
        row o  | 512 x e4m3                                          | 16 x ue8m0   |

    value = e4m3 * 2^(byte - 127), one byte for 32 columns.
    """

    id: str = "mxfp8_v41/1"
    row_elements: int = 528
    alignment: int = 528
    data_bytes: int = 512
    scale_bytes: int = 16
    quant_block: int = 32

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return numerics.quantize_mxfp8(rows, self.quant_block)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return numerics.dequantize_e4m3(codes, scales)


@dataclass(frozen=True, kw_only=True)
class Nvfp4V41Format(V41Format):
    """V4.1's compressed entries in NVFP4.

        byte   0                                               256              288
        row o  | 512 x e2m1, element 2j in the low nibble      | 32 x e4m3      |

    value = e2m1 * scale, one scale for 16 columns and none for the whole tensor; six bits.
    """

    id: str = "nvfp4_v41/1"
    row_elements: int = 288
    alignment: int = 288
    data_bytes: int = 256
    scale_bytes: int = 32
    quant_block: int = 16

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return numerics.quantize_nvfp4(rows, self.quant_block)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return numerics.dequantize_nvfp4(codes, scales)


@dataclass(frozen=True, kw_only=True)
class PlainFormat(KVFormat):
    """Plain 512-wide rows, rotation included, one dtype for all columns.

        row o  | 512 x bf16 (1024 bytes) or 512 x e4m3 (512 bytes) |        at o * row size

    bf16 holds the values; e4m3 holds value / scale with one scale per tensor. Page strides are multiples of 512 bytes.
    """

    dim: int = HEAD_DIM
    row_elements: int = HEAD_DIM
    alignment: int = 512

    def encode(self, rows: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """[n, 512] -> cache elements [n, 512]; an e4m3 cache stores sat(row / scale), a true fp32 quotient."""
        if self.dtype == torch.bfloat16:
            return rows.to(torch.bfloat16)
        # A Python divisor becomes a product with its reciprocal on CUDA.
        divisor = torch.as_tensor(scale, dtype=torch.float32, device=rows.device)
        return numerics.to_e4m3(rows.float() / divisor).view(self.dtype)

    def decode(self, rows: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Inverse of `encode`, fp32 [n, 512]."""
        return rows.float() * scale

    def write(
        self,
        cache: torch.Tensor,
        block_size: int,
        slots: torch.Tensor,
        rows: torch.Tensor,
        scale: float | torch.Tensor = 1.0,
    ) -> None:
        """Encode [n, 512] into the records at `slots`."""
        self.write_fields(cache, block_size, slots, self.encode(rows, scale))

    def read(
        self, cache: torch.Tensor, block_size: int, slots: torch.Tensor, scale: float | torch.Tensor = 1.0
    ) -> torch.Tensor:
        """fp32 [n, 512] of the records at `slots`."""
        (raw,) = self.read_fields(cache, block_size, slots)
        return self.decode(raw.view(self.dtype), scale)


@dataclass(frozen=True, kw_only=True)
class IndexerFp8Format(KVFormat):
    """Indexer keys in e4m3 with one fp32 scale, a power of two, per row.

        row o    | 128 x e4m3 |        at o * 128
        scale o  | fp32       |        at bs * 128 + o * 4

    Natural page bs * 132 bytes, stride rounded up to 576 (64 rows: 8640).
    """

    id: str = "indexer_fp8/1"
    dim: int = INDEX_DIM
    row_elements: int = 132
    dtype: torch.dtype = torch.uint8
    alignment: int = 576

    def fields(self, block_size: int) -> tuple[tuple[int, int], ...]:
        return ((0, 128), (block_size * 128, 4))

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 [n, 128] -> (codes uint8 [n, 128], scale bytes uint8 [n, 4])."""
        codes, byte = numerics.quantize_e4m3(rows, INDEX_DIM)
        return codes, numerics.ue8m0_scale(byte).float().view(torch.uint8)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Inverse of `encode`: fp32 [n, 128]."""
        return numerics.from_e4m3(codes) * scale.contiguous().view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class IndexerMxfp4Format(KVFormat):
    """Indexer keys in MXFP4: e2m1 codes with one ue8m0 byte per 32 columns.

        row o    | 64 bytes: element 2j in the low nibble of byte j, 2j + 1 in the high one |   at o * 64
        scale o  | 4 x ue8m0                                                                |   at bs * 64 + o * 4

    Rows are allocated with 68 bytes (natural page of 64 rows 4352, stride 4608) or, in the wide form, with 132 (stride
    8640, the second half of the page unused). The offsets are the same in both.
    """

    id: str = "indexer_mxfp4/1"
    dim: int = INDEX_DIM
    row_elements: int = 68
    dtype: torch.dtype = torch.uint8
    alignment: int = 576

    def fields(self, block_size: int) -> tuple[tuple[int, int], ...]:
        return ((0, 64), (block_size * 64, 4))

    def encode(
        self, rows: torch.Tensor, rounding: str = "ties_to_lower", floor: float = numerics.CACHE_FLOOR
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 [n, 128] -> (packed uint8 [n, 64], scale bytes uint8 [n, 4]); floor: smallest absmax of a block."""
        return numerics.quantize_e2m1(rows, rounding, floor=floor)

    def decode(self, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Inverse of `encode`: fp32 [n, 128]."""
        return numerics.dequantize_e2m1(packed, scale).float()

    def write(
        self,
        cache: torch.Tensor,
        block_size: int,
        slots: torch.Tensor,
        rows: torch.Tensor,
        rounding: str = "ties_to_lower",
        floor: float = numerics.CACHE_FLOOR,
    ) -> None:
        """Encode bf16 [n, 128] into the records at `slots`."""
        self.write_fields(cache, block_size, slots, *self.encode(rows, rounding, floor))


@dataclass(frozen=True, kw_only=True)
class CompressorStateFormat(KVFormat):
    """Compressor state: one fp32 row per token, `width` = coff * head_dim.

        row o  | width x fp32 kv projection | width x fp32 score + ape |        at o * 8 * width

    A state page usually shares its pool with KV pages, so its stride exceeds the natural size.
    """

    dtype: torch.dtype = torch.float32
    alignment: int = 576

    @property
    def width(self) -> int:
        """Columns of the kv half, and of the score half."""
        return self.row_elements // 2

    def write(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store fp32 [n, 2 * width] at `slots`; rows whose slot lies outside the pool are skipped."""
        keep = valid_slots(slots, cache.shape[0] * block_size)
        slots = slots[keep].long()
        cache[torch.div(slots, block_size, rounding_mode="floor"), slots % block_size] = rows[keep]

    def read(self, cache: torch.Tensor, block_size: int, slots: torch.Tensor) -> torch.Tensor:
        """fp32 [n, 2 * width] of the records at `slots`. Every slot must lie inside the pool."""
        slots = slots.long()
        return cache[torch.div(slots, block_size, rounding_mode="floor"), slots % block_size]


FP8_DS_MLA = Fp8DsMlaFormat()
MXFP8_V41 = Mxfp8V41Format()
NVFP4_V41 = Nvfp4V41Format()
MXFP8_V41_SPLIT = Mxfp8V41Format(id="mxfp8_v41_split/1", alignment=512, is_split=True)
NVFP4_V41_SPLIT = Nvfp4V41Format(id="nvfp4_v41_split/1", alignment=512, is_split=True)
MXFP8_FORMATS, NVFP4_FORMATS = (MXFP8_V41, MXFP8_V41_SPLIT), (NVFP4_V41, NVFP4_V41_SPLIT)
V41_FORMATS = (*MXFP8_FORMATS, *NVFP4_FORMATS)
"""V4.1's own: windows are of the first ones, entries of all."""
PLAIN_BF16 = PlainFormat(id="plain_bf16/1", dtype=torch.bfloat16)
PLAIN_FP8 = PlainFormat(id="plain_fp8/1", dtype=torch.float8_e4m3fn)
INDEXER_FP8 = IndexerFp8Format()
INDEXER_MXFP4 = IndexerMxfp4Format()
INDEXER_MXFP4_WIDE = IndexerMxfp4Format(id="indexer_mxfp4_wide/1", row_elements=132)

V41_KV_CACHES = {
    "fp8_ds_mla": (FP8_DS_MLA, FP8_DS_MLA),
    "fp8_ds_mla+nvfp4_v41": (FP8_DS_MLA, NVFP4_V41),
    "mxfp8_v41": (MXFP8_V41, MXFP8_V41),
    "mxfp8_v41+nvfp4_v41": (MXFP8_V41, NVFP4_V41),
}
"""What V4.1's layers may store, by name: formats of windows and of entries. The model's own is the last one."""

FORMATS: dict[str, Any] = {
    f.id: f
    for f in (
        *(FP8_DS_MLA, *V41_FORMATS),
        *(PLAIN_BF16, PLAIN_FP8),
        *(INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE),
    )
}


def compressor_state(head_dim: int, compress_ratio: int) -> CompressorStateFormat:
    """The state format of a compressor: ratio 4 keeps two halves per token (overlap), ratio 128 one."""
    width = head_dim * (2 if compress_ratio == 4 else 1)
    return CompressorStateFormat(id=f"compressor_state_{width}/1", dim=2 * width, row_elements=2 * width)


RECORD_FORMATS: dict[str, KVFormat] = FORMATS | {
    f.id: f for f in (compressor_state(HEAD_DIM, 4), compressor_state(HEAD_DIM, 128), compressor_state(INDEX_DIM, 4))
}
"""Formats of everything that lies in pages: caches, and the states of the models' compressors."""


def convert(
    source: torch.Tensor,
    source_format: KVFormat,
    target: torch.Tensor,
    target_format: KVFormat,
    slots: torch.Tensor,
    target_slots: torch.Tensor | None = None,
) -> None:
    """Copy records of one cache of rows to another one's, decoded and encoded again where the formats differ.

    Exact wherever the target's format holds the values: of nvfp4_v41/1 that are plain_bf16/1 and itself; mxfp8_v41/1
    and fp8_ds_mla/1 have four bits of each number and round. A cache of entries rewritten in nvfp4_v41/1 is rounded as
    V4.1's release rounds them. Between the interleaved and the split form of a format bytes are copied.

    slots          int64 [n], all of them in the source
    target_slots   int64 [n]; those outside the target are skipped. None: `slots`
    """
    if source_format.dim != target_format.dim:
        raise ValueError(
            f"convert: target_format: expected rows of {source_format.dim} columns, got {target_format.id} with "
            f"{target_format.dim}"
        )
    where = slots if target_slots is None else target_slots
    block_size, target_block_size = source.shape[1], target.shape[1]
    if source_format == target_format:
        fields = source_format.read_fields(source, block_size, slots)
        target_format.write_fields(target, target_block_size, where, *fields)
    elif isinstance(source_format, V41Format) and type(source_format) is type(target_format):
        records = torch.cat(source_format.read_fields(source, block_size, slots), dim=1)
        sizes = [size for _, size in target_format.fields(target_block_size)]
        target_format.write_fields(target, target_block_size, where, *records.split(sizes, dim=1))
    else:
        rows: Any = source_format.read(source, block_size, slots)
        target_format.write(target, target_block_size, where, rows.to(torch.bfloat16))


def label_of(format_id: str) -> str:
    """A short name of a format, for kernels' names: fp8, mxfp8, mxfp8split."""
    name = format_id.split("/")[0]
    return name.split("_")[0] + "split" * name.endswith("_split")


def get_format(c: Checker, argument: str, format_id: str, *allowed: KVFormat) -> Any:
    """The format with this id, which must be one of `allowed`."""
    c.one_of(argument, format_id, [f.id for f in allowed])
    return FORMATS[format_id]
