"""The operators of a fingerprinted run: what of their values is written, and their executions."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from amanda_core import OpContext
from amanda_core.engine.action import Routine
from amanda_core.interface.facts import Facts
from amanda_tools.fingerprint.files import digest_of
from amanda_tools.fingerprint.visits import Group
from amanda_tools.kit.operators.entries import REARRANGING, EitherWayOp, words
from amanda_tools.kit.operators.tool import runs_in_order

__all__ = ["Execution", "Op"]

#: Types that write all of their first input, if they work in place.
_WRITES = frozenset({"random", "full", "assign"})
#: Types whose outputs have elements of their inputs beside others, or that write parts of their
#: first input: the rest of it is what it was.
_KEEPS_PARTS = words("assign assign_slice cast diag gather masked_fill pad scatter where")
#: Types that may write after they have returned.
_COMMUNICATES = words("all_reduce all_gather reduce_scatter broadcast all_to_all send recv barrier")


@dataclass(slots=True)
class Execution:
    """One execution of an operator.

    Attributes:
        number: Number of its earlier executions, in any thread.
        reads_unwritten: Whether it reads memory that nothing has written.
    """

    number: int
    reads_unwritten: bool = False


class Op:
    """One operator, or one backward operator of it.

    Attributes:
        number: The number that its rows have.
        facts: The facts of its driver.
        group: The part of the model to which its values count.
        group_number: Number of the group, if its visits are recorded.
        part: The part of a step in which it runs; operators that communicate have one each.
        digest: A digest of its name and type.
    """

    def __init__(
        self, context: OpContext, described: EitherWayOp, facts: Facts, number: int
    ) -> None:
        self.number = number
        self.facts = facts
        self._in_order = runs_in_order(context.namespace)
        self.group = Group(described.phase, described.module, described.zone)
        self.group_number = 0
        communicates = described.word in _COMMUNICATES
        self.part = (described.phase, described.zone, number if communicates else -1)
        self.digest = digest_of(repr((described.phase, described.type, described.name)).encode())
        word, backward = described.word, described.phase == "backward"
        self.is_empty = not backward and word == "empty"
        self.rearranges = not backward and (word in REARRANGING or word in _KEEPS_PARTS)
        self.overwrites = not backward and word in _WRITES and described.type.endswith("_")
        #: Whether it makes room for a batch, which loaders do whenever their workers have one.
        self.is_loading = self.is_empty and self.group.zone == "data"
        #: The routines of the driver's recorder.
        self.notes: tuple[Routine, Routine] | None = None
        self._entered = self._left = 0
        #: Executions in progress by thread, where routines run with their operator.
        self._running: dict[int, Execution] = {}

    def enter(self) -> Execution:
        """Return the execution that begins."""
        self._entered += 1
        execution = Execution(self._entered - 1)
        if self._in_order:
            self._running[threading.get_ident()] = execution
        return execution

    def leave(self) -> Execution:
        """Return the execution that ends."""
        self._left += 1
        if not self._in_order:
            return Execution(self._left - 1)
        # A framework's workers may begin a backward operator in one thread and end it in another.
        running = self._running
        thread = threading.get_ident()
        if thread not in running and running:
            thread = next(reversed(running))
        return running.pop(thread, None) or Execution(self._entered - 1)
