"""What TensorFlow follows no gradient to in graphs, though a tool says what that gradient is.

An op may have no gradient function (`Round`), or one that gives none to some of its inputs. Where
such an op or its backward is replaced, eager tapes follow what the replacement says. A graph was
differentiated before, and nothing in it reads that. Owns finding these inputs, and what is refused.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from amanda_core.errors import UnsupportedError
from amanda_core.plan import Step
from amanda_driver_tf._graphs.body import Body
from amanda_driver_tf._graphs.records import Record, Records, children_of, components, is_symbolic
from amanda_driver_tf._insertion.jacobians import NO_PLACE
from amanda_driver_tf._insertion.versions import Key, arguments_of, behind, is_discrete, key_of
from amanda_driver_tf._tensorflow_internals.modules import ops

__all__ = ["lost_inputs", "refuse_unread", "unread_of"]


def lost_inputs(owner: Record) -> list[int]:
    """Inputs of an op that get no gradient, though others that are differentiated for need one."""
    return [index for index in _leading(owner) if owner.in_grads[index] is None]


def _is_unread(owner: Record, body: Body) -> bool:
    """Return True if a gradient is asked for in a body, but nothing reads this contribution."""
    leading = _leading(owner)
    if not leading or any(owner.in_grads[index] is not None for index in leading):
        return False
    # Of the gradients of a session's graph only some are computed.
    assert owner.run is not None
    results = [part for result in owner.run.results for part in components(result)]
    return (
        owner.forward.graph is not body.graph
        or body.fdef is not None
        or any(map(body.value_of, results))
    )


def unread_of(op: Any, body: Body) -> list[int]:
    """Inputs of an op to which gradients inside or beside a body go, that get and hand on none."""
    found: set[int] = set()
    for graph in (body.graph, *children_of(body.graph)):
        noted = Records.of(graph)
        for owner in noted.of_op_unfollowed(op) if noted is not None else ():
            if _is_unread(owner, body):
                found.update(lost_inputs(owner))
    return sorted(found)


def _leading(owner: Record) -> list[int]:
    """Inputs of an op that depend on what its differentiation was asked for."""
    if owner.run is None:
        return []
    captured = arguments_of(owner.forward.graph)
    wanted: set[Key | None] = {
        key_of(source) if is_symbolic(source) else captured.get(ops.tensor_id(source))
        for source in owner.run.sources
        if tf.is_tensor(source)
    }
    return [
        index
        for index, tensor in enumerate(owner.inputs[: len(owner.in_grads)])
        if is_symbolic(tensor)
        and not is_discrete(tensor.dtype)
        and not wanted.isdisjoint(behind([tensor]))
    ]


def refuse_unread(owner: Record, step: Step, body: Body) -> None:
    """Refuse that the backward of an op is replaced where nothing reads what it contributes.

    Raises:
        UnsupportedError: That is so.
    """
    if _is_unread(owner, body):
        raise UnsupportedError(
            f"In graphs TensorFlow follows no gradient through {owner.forward.name!r} "
            f"({owner.forward.type}); that of what replaces it would be lost",
            where=step.where,
            fix=NO_PLACE,
        )
