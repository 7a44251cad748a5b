# SPDX-License-Identifier: Apache-2.0
"""Who knows of what: vector clocks, and for every class of bytes who wrote and read it last.

Each agent counts what it does; `known[a, b]` is how much of what b did is before what a does next. Of what threads
wrote, the asynchronous proxy (copies in bulk, tensor cores) sees only what a proxy fence lies behind: `fenced`. Of what
tcgen05 does in tensor memory, `tensor` is what a's own tcgen05 instructions come after.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.model.trace import Trace

EVER = np.int32(2**30)


class Clocks:
    def __init__(self, trace: Trace) -> None:
        agents = len(trace.agents)
        self.trace = trace
        self.tables = np.zeros((3, agents, agents), np.int32)
        """What meetings hand on: known, fenced, seen."""
        self.known, self.fenced, self.seen = self.tables
        """seen: as `known`, of reads that are over as something came of them, and of nothing else."""
        self.known[np.diag_indices(agents)] = 1
        self.tensor = np.zeros((agents, agents), np.int32)
        self.waited = np.zeros((agents, agents), np.int32)
        """Loads and stores of tensor memory that an agent has waited for, and no fence has handed on."""
        self.is_async = np.array(trace.is_async)
        """Agents whose writes the asynchronous proxy sees without a fence."""
        self.is_tensor = np.array([name.startswith("('tensor") for name in trace.agents])
        self.writer = np.full(trace.classes, -1)
        self.written = np.zeros(trace.classes, np.int32)
        self.counts_versions = True
        self.versions = np.zeros(trace.classes, np.int32)
        self.is_unread = np.zeros(trace.classes, np.bool_)
        self.read = np.zeros((agents, trace.classes), np.int32)
        self.is_read = np.zeros(trace.classes, np.bool_)
        """Since it was written: then a write that comes after the reads comes after what they read, too."""

    def tick(self, agent: int) -> None:
        self.known[agent, agent] += 1

    def join(self, agents: tuple[int, ...]) -> None:
        """All of them meet."""
        chosen = list(agents)
        self.tables[:, chosen] = self.tables[:, chosen].max(axis=1, keepdims=True)
        for agent in chosen:
            self.tick(agent)

    def exchange(self, agents: tuple[int, ...]) -> None:
        """Threads of a warp see each other's registers: what these were loaded from may be overwritten. It does not
        order writes."""
        latest = self.known[list(agents)].max(axis=0)
        for agent in agents:
            np.maximum(self.seen[agent], latest, out=self.seen[agent])
            self.tick(agent)

    def of_reads(self, agent: int) -> Any:
        """Of others' reads, what is before the agent's next access."""
        return np.maximum(self.known[agent], self.seen[agent])

    def tables_of(self, agent: int) -> Any:
        """What it knows, what of it is fenced, and which reads are over, at this time: [3, agents]."""
        tables = self.tables[:, agent].copy()
        np.maximum(tables[2], tables[0], out=tables[2])
        return tables

    def of_issuer(self, agent: int) -> Any:
        """What something asynchronous comes after that a thread starts: of threads' writes those that a fence lies
        behind."""
        return np.where(self.is_async, self.known[agent], self.fenced[agent])

    def touch(
        self, agent: int, clock: int, known: Any, known_of_reads: Any, reads: Any, writes: Any, is_initial: bool
    ) -> str:
        """Note an access, and say what is wrong with it.

        agent, clock     who does it, and when of its own time
        known            what is before it: of others' writes; known_of_reads: of others' reads
        is_initial       nobody has waited for anything yet
        """
        wrong = ""
        for classes, name in ((reads, "read"), (writes, "write")):
            if len(classes):
                writer = self.writer[classes]
                bad = (writer >= 0) & (self.written[classes] > known[writer])
                if name == "write":
                    bad &= ~self.is_read[classes]
                if bad.any():
                    wrong = f"{name} not after the write of {self.trace.name(int(writer[bad][0]))}"
        if len(writes):
            readers = self.trace.readers[writes]
            early = self.read[readers, writes[:, None]] > known_of_reads[readers]
            if early.any():
                wrong = f"write not after the read of {self.trace.name(int(readers[early][0]))}"
            if not is_initial:
                unread = writes[self.is_unread[writes] & self.trace.operand[writes]]
                # what it has read in the same step it may replace
                if len(unread) and not np.isin(unread, reads).all():
                    wrong = wrong or "bytes of an operand written twice"
            self.writer[writes], self.written[writes] = agent, clock
            self.versions[writes] += not is_initial
            self.is_read[writes] = False
            self.is_unread[writes] = not is_initial
        if len(reads):
            self.read[agent, reads] = clock
            self.is_read[reads] = True
            self.is_unread[reads] = False
        return wrong

    def operand_is_whole(self, reads: Any) -> str:
        """What is wrong with bytes of shared memory that a product reads as one operand: they have to be of one
        version."""
        reads = reads[self.trace.operand[reads]]
        if (self.writer[reads] < 0).any():
            return "bytes of an operand that nobody has written"
        if self.counts_versions and len(reads) and np.ptp(self.versions[reads]):
            return "bytes of an operand are of different versions"
        return ""


class Meeting:
    """What a barrier hands from those who arrive to those who wait: what they know, have fenced and have seen. Who
    waits in a block's scope is told by the block's threads alone, in the cluster's by others that arrive in it, too."""

    def __init__(self, agents: int) -> None:
        self.coming = np.zeros((2, 3, agents), np.int32)
        self.over = np.zeros((2, 3, agents), np.int32)
        self.is_relaxed = False

    def arrive(self, clocks: Clocks, agent: int, order: str = "", is_remote: bool = False) -> None:
        """order: "relaxed", or the scope; is_remote: from another block."""
        given = clocks.tables[:, agent]
        if order != "relaxed" and not is_remote:
            np.maximum(self.coming, given, out=self.coming)
            clocks.tick(agent)
            return
        self.is_relaxed |= order == "relaxed"
        hidden = given * clocks.is_tensor
        if order != "relaxed" and "reads" in clocks.trace.unscoped:
            hidden[2] = clocks.of_reads(agent)
        if order != "relaxed" and "fenced" in clocks.trace.unscoped:
            hidden[1] = clocks.fenced[agent]
        for coming, scope in zip(self.coming, ("cta", "cluster"), strict=True):
            is_told = order == scope == "cluster"
            np.maximum(coming, given if is_told else hidden, out=coming)
        clocks.tick(agent)

    def add(self, agent: int, clock: int, tables: Any, issuer: int) -> None:
        """Something asynchronous is done, and with it all before it: see tables_of. Of what its issuer did itself only
        the reads are: it has used what it read."""
        given = tables.copy()
        given[:2, issuer] = 0
        for table in (given[0], given[2]):
            table[agent] = max(table[agent], clock)
        np.maximum(self.coming, given, out=self.coming)

    def turn(self) -> None:
        np.maximum(self.over, self.coming, out=self.over)

    def told(self, scope: str) -> Any:
        """Who waits in that scope."""
        return self.over[int(scope == "cluster")]

    def wait(self, clocks: Clocks, agent: int, scope: str = "cluster") -> None:
        tables = clocks.tables[:, agent]
        np.maximum(tables, self.told(scope), out=tables)
