"""Connection of one session to tinytape: interception, identification of ops, execution of plans.

Everything that depends on tinytape's internals is here. Read it from the top: `attach` replaces
`tinytape.run` by `_run`, `TapeAttachment.run` executes an op, and `pull` executes its backward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tinytape
from amanda_core import CoverageGap, IPoint, OpContext, Plan, Session, Site
from amanda_core.errors import UnsupportedError
from amanda_core.execution import BackwardProgram, backward_plans, several
from amanda_driver_tinytape.facts import TapeFacts
from tinytape import Leaf, Node, Operator, Tensor

__all__ = ["TapeAttachment", "attach"]

NAMESPACE = f"tinytape/{tinytape.__version__}/eager"

# Interception.

#: The functions that are replaced, as they were found.
_VANILLA: dict[str, Callable[..., Any]] = {}
#: Thread -> its attachment. Tools act only in the thread that applied them.
_ATTACHED: dict[int, TapeAttachment] = {}
_LOCK = threading.Lock()


def attach(session: Session) -> TapeAttachment:
    """Start intercepting operators in the calling thread."""
    attachment = TapeAttachment(session)
    with _LOCK:
        if not _ATTACHED:
            _VANILLA.update(run=tinytape.run, sgd=tinytape.sgd)
            # Operators look `run` up in their module, even if a program imported them by name.
            tinytape.run, tinytape.sgd = _run, _sgd
        _ATTACHED[attachment.thread] = attachment
    return attachment


def _run(operator: Operator, inputs: Sequence[Tensor]) -> Tensor:
    attachment = _ATTACHED.get(threading.get_ident())
    # `enabled` is False inside routines and under amanda.disabled().
    if attachment is None or not attachment.session.enabled:
        return _vanilla(operator, inputs)
    return attachment.run(operator, inputs)


def _vanilla(operator: Operator, inputs: Sequence[Tensor]) -> Tensor:
    tensor: Tensor = _VANILLA["run"](operator, inputs)
    return tensor


def _sgd(parameters: Sequence[Tensor], rate: float) -> None:
    _VANILLA["sgd"](parameters, rate)
    attachment = _ATTACHED.get(threading.get_ident())
    if attachment is not None:
        attachment.session.end_step()


# Identification of ops.


def _site(operator: Operator, inputs: Sequence[Tensor]) -> Site:
    """Describe an op. Its key is the same in each iteration and in each process.

    The place of the call identifies the op, together with its parameters, because one line may run
    several layers.
    """
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in (__name__, tinytape.__name__):
        assert frame.f_back is not None
        frame = frame.f_back
    place = (str(frame.f_globals["__name__"]), frame.f_code.co_name, frame.f_lasti)
    names = tuple(tensor.source.name for tensor in inputs if isinstance(tensor.source, Leaf))
    file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return Site(
        key=(operator.name, place, names),
        op_type=operator.name,
        namespace=NAMESPACE,
        name="/".join([*filter(None, names), operator.name]),
        source=f"{file}:{frame.f_lineno}",
    )


def _constant(tensor: Tensor) -> Tensor | None:
    """Return the value of an input for `OpContext.value`, or None if another op computed it."""
    return None if isinstance(tensor.source, Node) else tensor


# One session.


class TapeAttachment:
    """Connection of one session to tinytape."""

    #: Answers the questions of tools about tensors.
    facts = TapeFacts()

    def __init__(self, session: Session) -> None:
        self.session = session
        self.thread = threading.get_ident()

    def detach(self) -> None:
        """Restore the functions that were found, once the last session ends."""
        with _LOCK:
            del _ATTACHED[self.thread]
            if not _ATTACHED:
                tinytape.run, tinytape.sgd = _VANILLA["run"], _VANILLA["sgd"]

    def isolate(self) -> AbstractContextManager[object]:
        """Return a context manager in which nothing is recorded on the tape."""
        return tinytape.no_grad()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this driver does not instrument."""
        return [
            CoverageGap("Tensor.data", "NumPy functions called on it are not operators"),
            CoverageGap(
                "gradients of an op that is replaced",
                "the replacement is not divided into operators",
            ),
        ]

    # Forward.

    def run(self, operator: Operator, inputs: Sequence[Tensor]) -> Tensor:
        """Execute an op: pending analysis, edits before it, the op itself, edits after it."""
        context = self.session.open(
            _site(operator, inputs),
            operator,
            inputs=list(inputs),
            input_names=operator.inputs,
            constant=_constant,
        )
        try:
            with self.isolate():
                before = context.trigger_callback(IPoint.BEFORE_FORWARD)
            values = self._fold(before, inputs)
            if before.replacement is not None:
                # Not isolated: the replacement is differentiated as written.
                output = before.replacement.replace(values)
            else:
                output = _vanilla(operator, values)
            context.fill(outputs=[output])
            with self.isolate():
                after = context.trigger_callback(IPoint.AFTER_FORWARD)
            self._watch(output, context, is_replaced=before.replacement is not None)
            (output,) = self._fold(after, [output])
        finally:
            # Values are valid only while the op runs; keys and facts remain.
            context.release()
        assert isinstance(output, Tensor)
        return output

    def _fold(self, plan: Plan, values: Sequence[Tensor]) -> list[Tensor]:
        """Execute the insertions of a plan one by one, since each may be differentiated or not."""
        new = list(values)
        for step in plan:
            autodiff = step.action.autodiff
            with nullcontext() if autodiff else self.isolate():
                changes = step(new)
            for position, value in changes:
                # Not differentiated: a new value with the old source. The op computes with the new
                # value, and the gradient goes straight through to the source of the old one.
                new[position] = value if autodiff else Tensor(value.data, new[position].source)
        return new

    # Backward.

    def _watch(self, output: Tensor, context: OpContext, *, is_replaced: bool) -> None:
        """Replace the op's backward by `pull` if a tool needs it."""
        before, after = backward_plans(context)
        if is_replaced and (before or after):
            raise UnsupportedError(
                "A replaced op has no backward op of its own that a tool could instrument",
                where=context.where,
                fix="Do this in the routine that replaces the op, or do not replace the op",
            )
        node = output.source
        if not isinstance(node, Node) or is_replaced:
            return
        if before or after or self.session.wants_backward:
            vanilla = node.pull
            node.pull = lambda gradient: self.pull(node, vanilla, context, gradient)

    def pull(
        self, node: Node, vanilla: Callable[..., Any], forward: OpContext, gradient: Any
    ) -> Sequence[Any]:
        """Execute a backward op.

        A node is the whole backward of its op: it receives the op's whole gradient and returns the
        op's contributions. So the aligned view, planned on the forward context, directly surrounds
        the raw one.
        """
        backward = BackwardProgram(self.session, forward, node.name, node)
        if not backward.is_active:
            return vanilla(gradient)  # type: ignore[no-any-return]
        with self.isolate():
            arriving = backward.enter([gradient])
            if backward.replacement is not None:
                found = several(backward.replacement.replace(arriving))
                found += [None] * (len(node.sources) - len(found))
            else:
                found = list(vanilla(*arriving))
            return backward.leave(found)
