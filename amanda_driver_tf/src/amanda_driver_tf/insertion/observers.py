"""`Observers`: nodes that read values of a body and have no outputs.

Owns their insertion and the control edges to them: an op waits for the observers before it, and
readers of an op's outputs wait for those after it. Observers make no new version of a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from amanda_core.driver_kit import Step
from amanda_driver_tf.graphs.body import Node, Value
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.marks import mark_of
from amanda_driver_tf.insertion.nodes import Host, Inlined, New
from amanda_driver_tf.insertion.staging import trace
from amanda_driver_tf.insertion.step_functions import Layout, observing_function

__all__ = ["Observers"]

# A merge runs as soon as one of its inputs exists. Waiting for the other branch would hang.
_MERGES = ("Merge", "RefMerge")


class Observers:
    """The observers of one body.

    Args:
        edits: The edits of the body.
    """

    def __init__(self, edits: BodyEdits) -> None:
        self._edits = edits
        #: Op (by identity of its node) -> the observers after it.
        self._after: dict[int, list[New]] = {}
        self._collected: list[New] | None = None

    def insert(
        self, name: str, steps: Sequence[Step], layout: Layout, values: Sequence[Value]
    ) -> New:
        """Insert a node that calls the routines of `steps` with `values`.

        Only one staged step, or one that records marks, may be given at a time.
        """
        flat = observing_function(steps, layout, self._edits.around.refused)
        made: New | None = None
        if self._edits.body.fdef is not None:
            made = mark_of(name, steps[0], layout, values)
        if made is None and steps[0].action.staged:
            made = Inlined(name, trace(name, flat, values), values, ())
        elif made is None:
            made = Host(name, flat, values, ())
        self._edits.new.append(made)
        self._edits.changed = True
        return made

    def include(self, step: Step) -> bool:
        """Return True if a step is to be inserted as an observer.

        That is so if it is declared as one, or if edits are refused in this body.

        Raises:
            UnsupportedError: Edits are refused in this body, and the step is known to edit or its
                routine is staged, so that an edit could not be noticed at run time.
        """
        action, refused = step.action, self._edits.around.refused
        if action.observe or refused is None:
            return action.observe
        if action.staged or action.autodiff or action.kind.is_replacement:
            raise refused
        return True

    # Control edges.

    @contextmanager
    def collecting(self) -> Iterator[list[New]]:
        """Collect the observers that the reader of the values read meanwhile has to wait for."""
        outer, self._collected = self._collected, []
        try:
            yield self._collected
        finally:
            self._collected = outer

    def collect(self, observers: Iterable[New]) -> None:
        """Make the reader of the values read meanwhile wait for observers; see `collecting`."""
        if self._collected is not None:
            self._collected += observers

    def note_after(self, node: Node, observers: Sequence[New]) -> None:
        """Make readers of a node's outputs wait for the observers after it."""
        self._after.setdefault(id(node), []).extend(observers)

    def hold(self, node: Node, collected: Sequence[New]) -> None:
        """Make a node wait for `collected` and for the observers after the nodes that it reads."""
        if not (collected or self._after) or node.op_type in _MERGES:
            return
        awaited = list(collected)
        for value in node.inputs:
            awaited += self._after.get(id(value.node), ())
        if awaited and not self._edits.keeps_state(node):
            node.controls += dict.fromkeys(awaited)
            self._edits.changed = True
