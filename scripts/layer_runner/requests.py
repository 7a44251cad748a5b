# SPDX-License-Identifier: Apache-2.0
"""The batch: what each request feeds into the layer, and in which steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch


class InputError(ValueError):
    """Something the user gave that cannot be used, in one line."""


@dataclass(frozen=True)
class Part:
    """Rows of one request in one step: positions start .. start + rows - 1, of which the first `accepted` are kept."""

    request: int
    start: int
    rows: int
    accepted: int


@dataclass(frozen=True)
class Request:
    """One sequence and its way through the layer.

    hidden_states   bf16 [T, hidden], the layer's input after attn_norm
    prefill         tokens consumed as prefill
    decode          for each decode step, how many of its tokens are accepted; prefill + sum(decode) = T
    draft           query tokens of a decode step; those that are not accepted are rejected drafts
    rejected        bf16 [len(decode), draft, hidden], inputs of the rejected drafts (the accepted rows are not used)
    """

    hidden_states: torch.Tensor
    prefill: int
    decode: tuple[int, ...]
    draft: int
    rejected: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.hidden_states.shape[0]

    @property
    def reach(self) -> int:
        """One past the last position that is ever written, rejected drafts included."""
        reach, position = self.prefill, self.prefill
        for accepted in self.decode:
            reach, position = max(reach, position + self.draft), position + accepted
        return reach

    def rows(self, part: Part, decode_step: int | None) -> torch.Tensor:
        """The layer's input for one part of a step."""
        kept = self.hidden_states[part.start : part.start + part.accepted]
        if decode_step is None or part.accepted == part.rows:
            return kept
        return torch.cat([kept, self.rejected[decode_step, part.accepted : part.rows]])

    def one_shot(self) -> Request:
        """The same sequence as a single prefill."""
        return replace(self, prefill=self.length, decode=(), draft=1, rejected=self.rejected[:0])


def schedule(requests: Sequence[Request], chunk: int) -> Iterator[tuple[list[Part], list[int | None]]]:
    """The steps of the batch: parts, decodes first, with the number of each decode's step (None for prefill).

    Each step takes a decode step of every request that is past its prefill, and up to `chunk` prefill tokens of the
    others in order, as an engine with chunked prefill does.
    """
    position = [0] * len(requests)
    decoded = [0] * len(requests)
    while True:
        parts: list[Part] = []
        steps: list[int | None] = []
        for number, request in enumerate(requests):
            if position[number] >= request.prefill and decoded[number] < len(request.decode):
                accepted = request.decode[decoded[number]]
                parts.append(Part(number, position[number], request.draft, accepted))
                steps.append(decoded[number])
                decoded[number] += 1
        budget = chunk
        for number, request in enumerate(requests):
            rows = min(budget, request.prefill - position[number])
            if rows > 0:
                parts.append(Part(number, position[number], rows, rows))
                steps.append(None)
                budget -= rows
        if not parts:
            return
        for part in parts:
            position[part.request] += part.accepted
        yield parts, steps


def plan_decode(
    length: int, prefill_limit: int | None, steps: int, draft: int, generator: torch.Generator
) -> list[int]:
    """Accepted tokens of each decode step of a sequence of which `length` tokens are available.

    Every step accepts at least its first token. At least one token is left for the prefill; steps that would find no
    token are dropped.
    """
    accepted = torch.randint(1, draft + 1, (min(steps, length),), generator=generator).tolist()
    available = length if prefill_limit is None else min(length, prefill_limit + sum(accepted))
    while sum(accepted) > available - 1:
        accepted[-1] -= 1
        if accepted[-1] == 0:
            accepted.pop()
    return accepted


def make_requests(
    sequences: Sequence[torch.Tensor],
    *,
    prefill_limit: int | None,
    decode: int,
    draft: int,
    max_positions: int,
    seed: int,
) -> list[Request]:
    """Requests over the sequences, bf16 [n, hidden] each, cut to the prefill limit plus what decoding consumes."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for number, sequence in enumerate(sequences):
        accepted = plan_decode(sequence.shape[0], prefill_limit, decode, draft, generator)
        prefill = sequence.shape[0] - sum(accepted)
        if prefill_limit is not None:
            prefill = min(prefill, prefill_limit)
        rejected = torch.randn(len(accepted), draft, sequence.shape[1], generator=generator)
        request = Request(
            sequence[: prefill + sum(accepted)], prefill, tuple(accepted), draft, rms_normalize(rejected).bfloat16()
        )
        if request.reach > max_positions:
            raise InputError(
                f"request {number}: {request.length} tokens reach position {request.reach - 1}, "
                f"more than max_position_embeddings = {max_positions} allows"
            )
        requests.append(request)
    return requests


def rms_normalize(x: torch.Tensor) -> torch.Tensor:
    """fp32 rows scaled to a root mean square of 1, as attn_norm leaves them."""
    x = x.float()
    return x * x.square().mean(dim=-1, keepdim=True).rsqrt()


def read_text(path: Path) -> bytes:
    """The text's bytes; a text without a single visible character is an error."""
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise InputError(f"--text: cannot read {path}: {error.strerror}") from error
    if not text:
        raise InputError(f"--text: {path} holds no text")
    return text


def split_text(text: bytes, count: int) -> list[bytes]:
    """`count` pieces: one paragraph each, the last one takes all that is left. Too few paragraphs: the longest piece
    is cut at a third until there are enough."""
    if count > len(text):
        raise InputError(f"--text: {len(text)} bytes do not give {count} requests one each")
    # A maxsplit of 0 would split everywhere.
    pieces = [text] if count == 1 else re.split(rb"\n\s*\n", text, maxsplit=count - 1)
    while len(pieces) < count:
        longest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        piece = pieces[longest]
        if len(piece) < 2:
            raise InputError(f"--text: {len(text)} bytes do not give {count} requests one each")
        cut = max(len(piece) // 3, 1)
        pieces[longest : longest + 1] = [piece[:cut], piece[cut:]]
    return pieces


def text_sequences(path: Path, count: int, hidden_size: int, seed: int, longest: int) -> list[torch.Tensor]:
    """Hidden states of the first `longest` bytes of the text's pieces: each byte's row of a seeded, RMS-normalized
    embedding table."""
    pieces = [piece[:longest] for piece in split_text(read_text(path), count)]
    table = torch.randn(256, hidden_size, generator=torch.Generator().manual_seed(seed))
    table = rms_normalize(table).bfloat16()
    return [table[torch.frombuffer(bytearray(piece), dtype=torch.uint8).int()] for piece in pieces]


def array_sequences(path: Path, count: int, hidden_size: int) -> list[torch.Tensor]:
    """The array's rows for the first request, shorter and shorter prefixes of it for the others."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise InputError(f"--hidden-states: cannot read {path}: {error.strerror}") from error
    except (ValueError, OverflowError, MemoryError, SyntaxError, TokenError) as error:
        raise InputError(f"--hidden-states: {path} is not a complete .npy file: {error}") from error
    if array.dtype != np.float32:
        raise InputError(f"--hidden-states: {path}: expected float32, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] != hidden_size or not array.shape[0]:
        raise InputError(f"--hidden-states: {path}: expected shape [tokens, {hidden_size}], got {list(array.shape)}")
    states = torch.from_numpy(np.ascontiguousarray(array)).bfloat16()
    if not torch.isfinite(states).all():
        raise InputError(f"--hidden-states: {path} holds values that are not finite in bf16")
    tokens = states.shape[0]
    if count > tokens:
        raise InputError(f"--batch: expected at most {tokens} requests of an array of {tokens} tokens, got {count}")
    return [states[: max(tokens * (count - number) // count, 1)] for number in range(count)]
