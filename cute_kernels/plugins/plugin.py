# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins share: what is asked for, which versions are known, patches that wait for a module of the engine,
and what is logged.

CUTE_KERNELS_PLUGIN   "off": nothing is touched. "all", or names of parts with commas between them; "force" among them
                      skips the check of the engine's version. Empty, or not there: the parts that have run on a GPU
                      beside the engine's own, on GPUs like it, with that release. docs/engines.md says what they do
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

VARIABLE = "CUTE_KERNELS_PLUGIN"
PROVEN_ON = 9, 0
"""Compute capability of the GPUs that parts have run on beside the engines' own."""

PARTS = ("decode", "prefill", "insert", "norm", "indexer", "compressor", "output")


class Plugin:
    """The plug-in of one engine in this process.

    engine      the engine's distribution, whose logger shows what is logged here
    supported   versions whose seams are known: from the first one on, below the second
    parts       which of PARTS exist for this engine
    proven      which of them have run on a GPU beside the engine's own, and are replaced if nobody asks for any
    release     the engine's, with which they have
    """

    def __init__(
        self,
        engine: str,
        supported: tuple[tuple[int, ...], tuple[int, ...]],
        parts: Sequence[str] = PARTS,
        proven: Sequence[str] = (),
        release: tuple[int, ...] = (),
    ) -> None:
        self.engine, self.supported, self.own = engine, supported, tuple(parts)
        self.proven, self.release = tuple(proven), release
        self.is_asked = False
        """Whether the environment names what to replace."""
        self.log = logging.getLogger(f"{engine}.cute_kernels")
        self.said: set[str] = set()
        """Lines that are not logged again."""
        self.is_announced = False

    def requested(self) -> frozenset[str]:
        """The parts to replace: those asked for, if this version of the engine is known. ValueError on other words."""
        words = {word.strip() for word in os.environ.get(VARIABLE, "").split(",")} - {""}
        self.is_asked = bool(words)
        words = words - {"off"} if words else {*self.proven}
        unknown = words - {"all", "force", *PARTS}
        if unknown:
            allowed = ", ".join(("off", "all", "force", *PARTS))
            raise ValueError(f"{VARIABLE}: expected {allowed}, or several with commas, got {sorted(unknown)[0]!r}")
        parts = frozenset(self.own if "all" in words else words & {*self.own})
        if not parts:
            return parts
        version, (lowest, below) = self.version(), self.supported
        if not self.is_asked and numbers(version) != self.release:
            known = f"{dotted(self.release)} has run with its parts (ask for them: {VARIABLE}=all)"
        elif not lowest <= numbers(version) < below and "force" not in words:
            known = f"known is {dotted(lowest)} to below {dotted(below)} (force: {VARIABLE}=force,...)"
        else:
            return parts
        self.tell(f"nothing is replaced: {self.engine} is {version}, {known}")
        return frozenset()

    def version(self) -> str:
        """Of the installed engine."""
        try:
            return importlib.metadata.version(self.engine)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def unproven(self) -> str:
        """Why nothing is replaced on this GPU unless somebody asks for it; "": it is. Called where layers are made: the
        processes before that must not touch a GPU."""
        found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if self.is_asked or found == PROVEN_ON:
            return ""
        here = "there is no GPU" if found is None else f"the GPU has compute capability {found[0]}.{found[1]}"
        return f"{here} and {VARIABLE} asks for nothing"

    def tell(self, message: str) -> None:
        """Log why something is not replaced: a warning to who has asked for it."""
        self.once(message, logging.WARNING if self.is_asked else logging.INFO)

    def once(self, message: str, level: int) -> None:
        """Log this message, if it is the first time."""
        if message not in self.said:
            self.said.add(message)
            self.log.log(level, "cute_kernels: %s", message)

    def fall_back(self, part: str, reason: str) -> None:
        """Say, once, why the engine's own code runs in place of a part."""
        self.tell(f"{part}: the engine's own, as {reason}")

    def announce(self, what: str) -> None:
        """Say what is in use. Callers look at `is_announced` first: reading the version takes a millisecond."""
        self.is_announced = True
        self.once(f"in use in {self.engine} {self.version()}: {what}", logging.INFO)

    def guard(self, act: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        """`act`, but for what it raises: that is logged, and the engine goes on with its own code."""

        def guarded(module: ModuleType) -> None:
            try:
                act(module)
            except Exception:
                self.log.exception("cute_kernels: %s is not what it was: the engine's own code runs", module.__name__)

        return guarded


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release: (0, 33, 0) of "0.33.0rc1+cu130"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def dotted(release: Sequence[int]) -> str:
    return ".".join(map(str, release))


_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
"""Modules that are not imported yet -> what to do then."""


class _Finder(MetaPathFinder):
    """Lets the other finders find a module somebody waits for, and acts as soon as it has been executed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        actions = _waiting.pop(fullname, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            for act in actions:
                act(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def on_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call act(module) once the module is there: now, or when somebody imports it. Importing an engine's model takes
    seconds, and most of its processes never do."""
    if name in sys.modules:
        act(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(act)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def rebind(module: ModuleType, name: str, new: Any) -> None:
    """Put `new` in the place of a module's class or function, also where other modules of the same engine have already
    imported it by its name."""
    old = getattr(module, name)
    top = module.__name__.split(".")[0]
    for other in [m for n, m in list(sys.modules.items()) if m is not None and n.split(".")[0] == top]:
        if vars(other).get(name) is old:
            setattr(other, name, new)
