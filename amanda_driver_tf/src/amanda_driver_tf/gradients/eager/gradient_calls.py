"""Calls of ops' gradient functions, in which all ops are backward ops of that op.

Owns the context of such a call, and the conclusion that an op's gradient has no actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.identity.places import InGradient
from amanda_driver_tf.identity.program import EagerProgram
from amanda_driver_tf.identity.records import Record
from amanda_driver_tf.tensorflow_internals.tapes import executes_eagerly, no_tape
from amanda_driver_tf.threads import STATE

__all__ = ["in_gradient", "unsupported_in_graph"]


def in_gradient(
    program: EagerProgram, record: Record, skip: Any, compute: Callable[[], Any]
) -> Any:
    """Run a gradient function of an op, whose ops are backward ops of that op.

    Args:
        program: The program that the op ran in.
        record: Record of the op.
        skip: Indices of inputs whose gradients are not requested.
        compute: Runs the function.
    """
    session = program.session
    epoch, caching = session.epoch, session.caching
    again = not no_tape()  # Whether the pass is itself recorded.
    settled = record.settled_again if again else record.settled
    loud = session.wants_backward and not (caching and settled == epoch and record.skip == skip)
    eager = executes_eagerly() if loud else False
    if loud and not eager:
        _check_in_graph(program, record)
    place = InGradient(program, record) if eager else None
    before = STATE.eager
    try:
        STATE.eager = place
        results = compute()
        STATE.eager = before
    except BaseException:
        STATE.eager = before
        raise
    if place is not None and caching and all(child.idle == epoch for child in place.executed):
        record.skip = skip
        if not again:
            record.settled = epoch
        elif all(child.settled == epoch for child in place.executed):
            record.settled = record.settled_again = epoch
    return results


def _check_in_graph(program: EagerProgram, record: Record) -> None:
    epoch, children = program.session.epoch, record.children.values()
    if any(child.edited == epoch for child in children):
        raise unsupported_in_graph(f"op {record.site.name!r}, at {record.site.source}")
    if any(child.planned == epoch for child in children):
        program.note_graph(record)


def unsupported_in_graph(where: str) -> UnsupportedError:
    """Return the error for a gradient routine that would have to be part of a graph."""
    error = UnsupportedError(
        "A gradient routine of an op that ran eagerly cannot run while TensorFlow builds a graph "
        "of the gradient (jacobian, batch_jacobian, a function around the tape)",
        where=where,
        fix="Pass experimental_use_pfor=False with a persistent tape, or mark the routine of the "
        "forward op @amanda.staged",
    )
    error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph keeps it as it is.
    return error
