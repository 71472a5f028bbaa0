"""`EagerMode`: the eager mode of one attachment.

Owns its parts, their start and their end, and what they share: the op sites of this session, which
backward ops are settled, what is active. Who calls it is `intercept`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from amanda_core import Blind, Session
from amanda_driver_tf._eager.frames import source_of, user_stacklevel
from amanda_driver_tf._eager.intercept import PATCHES
from amanda_driver_tf._eager.op_types import OpType
from amanda_driver_tf._eager.places import Forward, InGradient
from amanda_driver_tf._eager.records import Record, backward_site
from amanda_driver_tf._eager.scopes import Activation, Labels, Scopes
from amanda_driver_tf._eager.sites import Sites
from amanda_driver_tf._eager.taped import LEFT, Applied, unsupported_in_graph
from amanda_driver_tf._state import STATE
from amanda_driver_tf._tensorflow_internals.tapes import executes_eagerly, no_tape

if TYPE_CHECKING:
    from amanda_driver_tf._attachment import TensorFlowAttachment

__all__ = ["EagerMode"]


class EagerMode:
    """Instruments the operators that one thread executes eagerly.

    Attributes:
        session: The session.
        sites: The op sites passed so far.
        edits: Number of values edited and ops replaced so far.
    """

    def __init__(self, attachment: TensorFlowAttachment) -> None:
        self.session: Session = attachment.session
        self.control = self.session.control
        self.sites = Sites(
            self.session.persistent("tensorflow.eager.scopes", Scopes),
            self.session.persistent("tensorflow.eager.labels", Labels),
            self.session.persistent("tensorflow.eager.names", dict),
            self._drop,
        )
        self.edits = 0
        self._between: dict[Any, Record] = {}
        self._between_names: dict[str, int] = {}
        self._applied: Applied | None = None
        self._started = False
        #: Gradients that became part of a graph -> why their observers did not run.
        self._unseen: dict[str, str] = self.session.persistent("tensorflow.eager.unseen", dict)

    def start(self) -> None:
        """Start intercepting in this thread.

        Raises:
            UnsupportedError: TensorFlow is not what this mode was written for.
        """
        PATCHES.acquire()
        self._started = True
        STATE.eager = Forward(self)

    def stop(self) -> None:
        """Stop intercepting and restore what was found."""
        if not self._started:
            return
        self._started = False
        STATE.eager = None
        STATE.handed.clear()
        self.sites.clear()
        self._between.clear()
        PATCHES.release()

    def coverage(self) -> Sequence[Blind]:
        """Return what is not seen, and why."""
        return [
            Blind("tf.data pipelines, checkpoints, SavedModels", "they are none of the model"),
            Blind("the Python body of tf.py_function", "it is one op"),
            Blind(
                "gradients of ops that ran outside `apply`",
                "their gradient functions run as without tools",
            ),
            Blind(
                "ops that a gradient function calls for some shapes only",
                "a gradient function that was found to need nothing is not looked into again",
            ),
            *(Blind(what, why) for what, why in self._unseen.items()),
        ]

    # What is active.

    def gradients_wanted(self) -> bool:
        """Return True if gradient routines are to run now; warns once where the tools were left."""
        if self.session.closed:
            self.session.warn_once(LEFT, user_stacklevel())
            return False
        return self.session.enabled

    def applied(self) -> Applied:
        """The tools of now."""
        if self._applied is None or self._applied.epoch != self.session.epoch:
            self._applied = Applied(self)
        return self._applied

    # Gradient functions.

    def in_gradient(
        self, record: Record, skip: Any, compute: Callable[[], Any], again: bool | None = None
    ) -> Any:
        """Run a gradient function of an op; its ops are backward ops of that op.

        Args:
            record: Record of the op.
            skip: Indices of inputs whose gradients nobody asks for.
            compute: Runs the function.
            again: Whether this is itself recorded; found out if not given.
        """
        session = self.session
        epoch, caching = session.epoch, session.caching
        if again is None:
            again = not no_tape()
        settled = record.settled_again if again else record.settled
        loud = session.wants_backward and not (caching and settled == epoch and record.skip == skip)
        eager = executes_eagerly() if loud else False
        if loud and not eager:
            self._check_in_graph(record)
        place = InGradient(self, record) if eager else None
        before, STATE.eager = STATE.eager, place
        try:
            results = compute()
        finally:
            STATE.eager = before
        if place is not None and caching and all(child.idle == epoch for child in place.met):
            record.skip = skip
            if not again:
                record.settled = epoch
            elif all(child.settled == epoch for child in place.met):
                record.settled = record.settled_again = epoch
        return results

    def _check_in_graph(self, record: Record) -> None:
        epoch, children = self.session.epoch, record.children.values()
        if any(child.edited == epoch for child in children):
            raise unsupported_in_graph(f"op {record.site.name!r}, at {record.site.source}")
        if any(child.planned == epoch for child in children):
            self.note_graph(record)

    def note_graph(self, record: Record) -> None:
        """Note that observers of an op's gradient did not run, as it became part of a graph."""
        self._unseen[f"a gradient of {record.site.name!r}"] = (
            "it was computed while TensorFlow built a graph (jacobian, batch_jacobian, a function "
            "around the tape)"
        )

    def between(self, op_type: OpType, key: Any, frame: FrameType | None) -> Record:
        """The record of a backward op that belongs to no forward op."""
        record = self._between.get(key)
        if record is None:
            number = self._between_names.get(op_type.name, 0) + 1
            self._between_names[op_type.name] = number
            site = backward_site(op_type.name, key, None, number, source_of(frame))
            record = self._between[key] = Record(site, op_type, backward=True)
        return record

    # Layers.

    def enter(self, layer: Any, parent: Activation) -> Activation:
        """The activation of a call of a layer."""
        scopes = self.sites.scopes
        activation = scopes.enter(layer, parent)
        if scopes.dead:
            self._sweep()
        return activation

    def _sweep(self) -> None:
        """Forget what belongs to layers that are gone."""
        paths = self.sites.scopes.take_dead()
        gone = frozenset(paths)
        for context in self.session.contexts():
            if context.module_path in gone:
                self.session.forget(context)
        self.sites.forget_paths(paths)

    def _drop(self, record: Record) -> None:
        for one in (record, *record.children.values()):
            if one.context is not None:
                self.session.forget(one.context)
