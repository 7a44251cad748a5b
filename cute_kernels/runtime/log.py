# SPDX-License-Identifier: Apache-2.0
"""What the library logs, through Python's logging, under "cute_kernels": nothing unless somebody asks.

info    kernels compiled and loaded, with times, and why they were not in the cache; references that run in place of
        kernels, and why; whether an architecture's own kernel or the portable one is taken
debug   the first call of every op with such arguments, and the kernels it launched

CUTE_KERNELS_LOG=info or debug prints them on standard error. An application may set up handlers instead, as for any
library. Nothing is logged where a call repeats, so that logging costs nothing there.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

VARIABLE = "CUTE_KERNELS_LOG"
LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}

logger = logging.getLogger("cute_kernels")
logger.addHandler(logging.NullHandler())


def configure(value: str) -> None:
    """Print what is logged on standard error, from a level on; "": print nothing."""
    if not value:
        return
    if value not in LEVELS:
        raise ValueError(f"{VARIABLE}: expected 'info' or 'debug', got {value!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(LEVELS[value])
    logger.propagate = False  # an application's own handlers would print it again


configure(os.environ.get("CUTE_KERNELS_LOG", ""))


def describe(value: Any) -> str:
    """An argument of an op in a few characters: bfloat16[64, 128, 512]."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
