"""score_top_k_prefill on a GPU: chunk after chunk, the kernel of mqa_logits, then that of top_k_per_row_prefill.

Nothing but the order of the launches makes a chunk's picks wait for its scores, and the next chunk's scores for these
picks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_kernels.indexer import chunks, logits, topk
from cute_kernels.indexer.call import LogitsCall
from cute_kernels.indexer.topk_prefill import bounds


def deployment_keys(config: Any, tp: int, arch: str) -> list[Any]:
    """Those of scores and picks, where there are scores."""
    keys = logits.deployment_keys(config, tp, arch)
    return [*keys, *topk.deployment_keys(config, tp, arch)] if keys else []


class Call(NamedTuple):
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

    def rows(self, first: int, last: int) -> Call:
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


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    call = Call(*args)
    for first, last, scores, _ in call.walk():
        why = call.rows(first, last).scores(scores).why_not()
        return (False, why) if why else topk.check(scores, last - first, call.out.shape[1])
    return True, ""


def launch(*args: Any) -> None:
    """Run the kernels on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    call = Call(*args)
    k, shifts = call.out.shape[1], -1 if call.max_seqlen_k > 0 else 0
    for first, last, scores, is_scored in call.walk():
        part = call.rows(first, last)
        if is_scored:
            logits.run(part.scores(scores), skip=k, op="score_top_k_prefill")
        starts, ends = bounds(part.start, part.end)
        topk.run(scores, starts, ends, part.out, last - first, k, call.k.shape[0], shifts)
