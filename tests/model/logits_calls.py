# SPDX-License-Identifier: Apache-2.0
"""Calls of the indexer's scores as the op launches them, in the model's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.indexer.hopper.logits import LogitsConfig, LogitsKey
from cute_kernels.indexer.hopper.logits_mxfp4 import Mxfp4Config, Mxfp4LogitsKey
from cute_kernels.isa_probes.meaning import TensorMap
from cute_kernels.runtime import trust
from tests.indexer.test_logits_launch import Launches
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import PARAMETERS, Program, parse

QUERY_MAP, KEY_MAP = 0, 2
"""Parameters of the kernel that are tensor maps."""


@dataclass
class Placed:
    """Tensors in the model's memory: host addresses become its own."""

    memory: GlobalMemory = field(default_factory=GlobalMemory)
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def put(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
        self.spans.append((storage.data_ptr(), storage.nbytes(), self.memory.put(raw.numpy())))

    def at(self, address: int) -> int:
        if address == 0:
            return 0
        for start, size, placed in self.spans:
            if start <= address < start + size:
                return placed + address - start
        raise ValueError(f"address {address:#x}: expected one of a tensor of the call")


@dataclass
class Scores:
    """What a call launches, and the model of it."""

    key: BlackwellLogitsKey | LogitsKey | Mxfp4LogitsKey
    got: dict[str, Any]
    placed: Placed
    out: int
    stride: int
    made_again: float = 0.0
    """Share of sums that warps have made a second time, which hides what is wrong with the first ones."""

    @classmethod
    def of(cls, op: str, args: dict[str, Any], processors: int, arch: str = "sm_100a", skip: int = 0) -> Scores:
        """The call, as it is launched on a GPU with so many multiprocessors."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trust, "is_trusted", lambda op, kernel, index: True)
            gpu = Launches(patch, arch, processors)
            key, got = gpu.run(op, args, skip=skip)
        placed = Placed()
        for tensor in args.values():
            if isinstance(tensor, torch.Tensor) and tensor is not args["out"]:
                placed.put(tensor)
        rows, columns = args["out"].shape
        stride = columns + 5
        return cls(key, got, placed, placed.memory.reserve(rows * stride * 4), stride)

    def place(self, program: Program) -> tuple[bytes, dict[int, TensorMap]]:
        """Parameters, as LogitsKernel.__call__ makes them, and tensor maps."""
        config, got, at = self.key.config, self.got, self.placed.at
        box, swizzle = config.box, config.row_bytes
        if isinstance(config, Mxfp4Config):
            # packed codes lie one after the other, and contiguous keys come a tile at a time
            box, swizzle = (box if self.key.paged else config.keys), 0
        elif not isinstance(config, LogitsConfig):
            swizzle = config.operand.swizzle
        query_map = TensorMap(
            at(got["q"]) - GlobalMemory.BASE,
            (config.row_bytes, config.heads, got["row_count"], got["requests"]),
            (got["q_head"], got["q_row"], got["q_request"]),
            (config.row_bytes, config.heads, 1, 1),
            1,
            swizzle,
        )
        key_map = TensorMap(
            at(got["keys"]) - GlobalMemory.BASE,
            (config.row_bytes, got["page_rows"], got["pages"]),
            (got["key_stride"], got["page_stride"]),
            (config.row_bytes, box, 1),
            1,
            swizzle,
        )
        values: list[Any] = [bytes(128), bytes(12), bytes(128)]
        # what products do to the sums, of which the kernel reads nothing
        values += [bytes(1)] * (2 * (not isinstance(self.key, BlackwellLogitsKey)))
        values += [got["requests"], got["row_count"]]
        values += [*divisor(-(-got["row_count"] // config.rows)), *divisor(got["blocks"])]
        values += [at(got["starts"]), at(got["ends"]), got["end_request"], got["limit"], got["out"].shape[1]]
        values += [got["shifts"], got["skip"], at(got["scales"]), got["page_stride"]]
        values += [*divisor(-(-got["page_rows"] // config.box)), got["pages"], got["limit"]]
        values += [at(got["table"]), got["table_stride"], got["table_columns"]]
        values += [at(got["weights"].data_ptr()), got["weights"].stride(0) * 4]
        if not isinstance(self.key, LogitsKey):
            values += [at(got["q_scale"]), got["q_scale_request"], got["q_scale_row"]]
        values += [self.out, self.stride * 4, got["clean"]]
        maps = {QUERY_MAP: query_map, KEY_MAP: key_map}
        return pack(program, values), {PARAMETERS + program.parameters[i].offset: map_ for i, map_ in maps.items()}

    def run(self, ptx: str | Program, **options: Any) -> tuple[Any, Any]:
        """fp32 scores [rows, columns], poison where nothing was written, and how often each was written."""
        program = parse(ptx) if isinstance(ptx, str) else ptx
        parameters, maps = self.place(program)
        memory = self.placed.memory
        blocks = self.got["blocks"]
        options |= {"blocks": blocks, "size": self.key.smem_bytes, "tensor_maps": maps}
        counts = run_grid(program, parameters, memory, **options)
        if isinstance(self.key, BlackwellLogitsKey):
            loads = [program.find(rf"^tcgen05\.ld\..*\.x{columns}\.") for columns in ("4", r"\d\d")]
            again, once = (sum(counts[op.number] for op in ops) for ops in loads)
            self.made_again = again * 4 / (once * (32 if self.key.heads % 32 == 0 else 16))
        rows, columns = self.got["out"].shape
        scores = memory.get(self.out, (rows, self.stride), np.float32)
        start = self.out - memory.BASE
        written = memory.written[start : start + rows * self.stride * 4].reshape(rows, self.stride, 4)
        assert (written == written[..., :1]).all()
        assert not written[:, columns:].any()
        return scores[:, :columns], written[:, :columns, 0]
