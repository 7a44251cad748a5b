# SPDX-License-Identifier: Apache-2.0
"""Calls of other projects' functions, kept in files: the arguments by name, and what the call returned or changed.

A file is an npz archive: `index` is a JSON text with the structure of all cases, the other arrays are the bytes behind
their tensors. Tensors come back with the strides they had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.helpers import raw_bytes

FOLDER = Path(__file__).parent


@dataclass
class Case:
    """One call.

    arguments   keyword arguments, as they were before the call
    result      what the call returned
    changed     name -> an argument's tensor after the call, of those that the call wrote
    """

    arguments: dict[str, Any]
    result: Any = None
    changed: dict[str, Any] = field(default_factory=dict)

    def replay(self, function: Callable[..., Any], device: str = "cpu") -> tuple[Any, dict[str, Any]]:
        """(result, arguments after the call) of `function` on copies of the arguments on a device, brought back."""
        arguments = on(device, self.arguments)
        return on("cpu", (function(**arguments), arguments))


@dataclass(frozen=True)
class File:
    """`about` says whose code made the cases: project, version, licence, what else identifies it."""

    about: dict[str, str]
    cases: dict[str, Case]


def on(device: str, value: Any) -> Any:
    """A copy of nested arguments whose tensors, strides kept, lie on `device`."""
    if isinstance(value, torch.Tensor):
        memory = raw_bytes(value).to(device, copy=True).view(value.dtype)
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, Mapping):
        return {key: on(device, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on(device, item) for item in value)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**on(device, vars(value)))
    return value


def call(function: Callable[..., Any], arguments: Mapping[str, Any], device: str = "cpu", by_name: bool = True) -> Case:
    """What `function` makes of copies of the arguments on `device`."""
    given = on(device, dict(arguments))
    result = function(**given) if by_name else function(*given.values())
    after = on("cpu", given)
    before = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    changed = {
        name: after[name] for name, old in before.items() if not torch.equal(raw_bytes(old), raw_bytes(after[name]))
    }
    return Case(dict(arguments), on("cpu", result), changed)


def save(path: Path, about: Mapping[str, str], cases: Mapping[str, Case]) -> None:
    arrays: dict[str, np.ndarray] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            first = value.storage_offset() * value.element_size()
            data = raw_bytes(value)[first:] if value.numel() else raw_bytes(value)[:0]
            same = [name for name, old in arrays.items() if np.array_equal(old, data.numpy())]
            name = same[0] if same else f"tensor{len(arrays)}"
            arrays[name] = data.numpy()
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": name, "dtype": dtype, "shape": list(value.shape), "strides": list(value.stride())}
        if isinstance(value, Mapping):
            return {"mapping": {key: pack(item) for key, item in value.items()}}
        if isinstance(value, SimpleNamespace):
            return {"namespace": {key: pack(item) for key, item in vars(value).items()}}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [pack(item) for item in value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        return value

    index = {"about": dict(about), "cases": {name: pack(vars(case)) for name, case in cases.items()}}
    np.savez_compressed(path, index=np.array(json.dumps(index)), **arrays)


def load(name: str) -> File:
    """A file of this folder."""
    with np.load(FOLDER / f"{name}.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}

    def unpack(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            memory = torch.from_numpy(arrays[value["tensor"]].copy()).untyped_storage()
            empty = torch.empty(0, dtype=getattr(torch, value["dtype"]))
            return empty.set_(memory, 0, value["shape"], value["strides"])
        ((kind, content),) = value.items()
        if kind == "dtype":
            return getattr(torch, content)
        if kind in ("list", "tuple"):
            items = [unpack(item) for item in content]
            return items if kind == "list" else tuple(items)
        items = {key: unpack(item) for key, item in content.items()}
        return SimpleNamespace(**items) if kind == "namespace" else items

    index = json.loads(str(arrays.pop("index")))
    return File(index["about"], {key: Case(**unpack(case)) for key, case in index["cases"].items()})
