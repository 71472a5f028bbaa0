"""`EagerProgram`: the eager program that one attachment instruments.

Owns the op sites of this session, the layers being called, and whether gradient routines still run.
`places` identifies ops; `execute` and `taped` run them.
"""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from amanda_core.driver_kit import Activation, Session, Tool
from amanda_driver_tf.identity.frames import BETWEEN
from amanda_driver_tf.identity.records import Record, backward_site
from amanda_driver_tf.identity.sites import Sites
from amanda_driver_tf.operators.op_types import OpType

__all__ = ["LEFT", "Applied", "EagerProgram"]

LEFT = (
    "A gradient was computed after `apply` ended: edits made in the forward program stay, "
    "backward routines do not run. Compute it inside `apply`."
)


class Applied:
    """The tools active in a forward pass; used to warn if `apply` ends before its gradient."""

    __slots__ = ("_session", "_tools", "epoch")

    def __init__(self, session: Session) -> None:
        self._session = session
        self.epoch = session.epoch
        self._tools = tuple(weakref.ref(tool) for tool in session.tools)

    def miss(self) -> None:
        """Warn once if a tool that analyses backward ops is no longer applied."""
        session = self._session
        if session.epoch == self.epoch:
            return
        for reference in self._tools:
            tool: Tool | None = reference()
            if tool is None or (
                tool.analyses_backward and not any(tool is one for one in session.tools)
            ):
                session.warn_once(LEFT, BETWEEN)


class EagerProgram:
    """The eager program of one thread.

    Attributes:
        session: The session whose tools instrument it.
        sites: The op sites seen so far.
        edits: Number of values edited and ops replaced so far.
        unseen: Gradients that became part of a graph -> why their observers did not run.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.control = session.control
        self.sites = Sites(session, self._drop)
        self.edits = 0
        self.unseen: dict[str, str] = session.persistent("tensorflow.eager.unseen", dict)
        self._between: dict[Any, Record] = {}
        self._between_names: dict[str, int] = {}
        self._applied: Applied | None = None

    def clear(self) -> None:
        """Forget all records, but not the names."""
        self.sites.clear()
        self._between.clear()

    # What is active.

    def gradients_wanted(self) -> bool:
        """Return True if gradient routines run now; warn once if `apply` has ended."""
        if self.session.closed:
            self.session.warn_once(LEFT, BETWEEN)
            return False
        return self.session.enabled

    def applied(self) -> Applied:
        """Return the tools that are active now."""
        if self._applied is None or self._applied.epoch != self.session.epoch:
            self._applied = Applied(self.session)
        return self._applied

    def note_graph(self, record: Record) -> None:
        """Record that observers of an op's gradient did not run, as it became part of a graph."""
        self.unseen[f"a gradient of {record.site.name!r}"] = (
            "it was computed while TensorFlow built a graph (jacobian, batch_jacobian, a function "
            "around the tape)"
        )

    # Records.

    def between(self, op_type: OpType, key: Any, frame: FrameType | None) -> Record:
        """Return the record of a backward op that belongs to no forward op."""
        record = self._between.get(key)
        if record is None:
            number = self._between_names.get(op_type.name, 0) + 1
            self._between_names[op_type.name] = number
            site = backward_site(op_type.name, key, None, number, self.sites.source(frame))
            record = self._between[key] = Record(site, op_type, backward=True)
        return record

    def enter(self, layer: Any, parent: Activation) -> Activation:
        """Return an activation for a call of a layer."""
        scopes = self.sites.scopes
        if scopes.dead:
            self._sweep()
        return Activation(scopes.enter(layer, parent.scope, False))

    def _sweep(self) -> None:
        """Forget contexts and records of layers that are gone."""
        dead = self.sites.scopes.take_dead()
        paths = {path for _, path in dead if path is not None}
        for context in self.session.contexts():
            if context.module_path in paths:
                self.session.forget(context)
        self.sites.forget_layers(paths)
        self.sites.scopes.free(label for label, path in dead if path is None)

    def _drop(self, record: Record) -> None:
        for one in (record, *record.children.values()):
            if one.context is not None:
                self.session.forget(one.context)
