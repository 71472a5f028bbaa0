"""Refuses replacements whose gradient TensorFlow would not propagate in a graph.

An op may have no gradient function (`Round`), or one that returns no gradient for some inputs. If
such an op or its backward is replaced, eager tapes use the gradient of the replacement. A graph was
differentiated before that, and nothing in it would read this gradient. Owns finding such inputs,
and the refusal.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.body import Body
from amanda_driver_tf.graphs.function_graphs import children_of
from amanda_driver_tf.graphs.records import Record, Records, components, is_symbolic
from amanda_driver_tf.insertion.jacobians import NO_PLACE
from amanda_driver_tf.insertion.op_values import Key, arguments_of, is_discrete, key_of, upstream_of
from amanda_driver_tf.tensorflow_internals.modules import ops

__all__ = ["lost_inputs", "refuse_unread", "unread_of"]


def lost_inputs(owner: Record) -> list[int]:
    """Return the indices of an op's inputs that need a gradient, but get none.

    Args:
        owner: The gradient of the op: a call of its gradient function.
    """
    return [index for index in _leading(owner) if owner.in_grads[index] is None]


def _is_unread(owner: Record, body: Body) -> bool:
    """Return True if a body requests a gradient, but nothing reads this op's contribution."""
    leading = _leading(owner)
    if not leading or any(owner.in_grads[index] is not None for index in leading):
        return False
    # A run of a session may compute only some of the gradients in its graph.
    assert owner.run is not None
    results = [part for result in owner.run.results for part in components(result)]
    return (
        owner.forward.graph is not body.graph
        or body.fdef is not None
        or any(map(body.value_of, results))
    )


def unread_of(op: Any, body: Body) -> list[int]:
    """Return the inputs of an op that should receive a gradient, but get none.

    An input should receive one if it is differentiable and depends on a source of a differentiation
    that reached the op. It is returned if the op's gradient function gave no such input a gradient.

    Args:
        op: An op of the forward program.
        body: The body that has the op. Differentiations in its graph count, and those in the graphs
            of gradients that were built for this graph. In a session, one counts if the run
            computes some of its results.

    Returns:
        The indices of these inputs, sorted; empty if gradients pass the op as they should.
    """
    found: set[int] = set()
    for graph in (body.graph, *children_of(body.graph)):
        noted = Records.of(graph)
        for owner in noted.of_op_with_unpropagated(op) if noted is not None else ():
            if _is_unread(owner, body):
                found.update(lost_inputs(owner))
    return sorted(found)


def _leading(owner: Record) -> list[int]:
    """Return the indices of an op's inputs that depend on the sources of its differentiation.

    Empty if the differentiation is not known. Integers and the like are left out.
    """
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
        and not wanted.isdisjoint(upstream_of([tensor]))
    ]


def refuse_unread(owner: Record, step: Step, body: Body) -> None:
    """Refuse to replace the backward of an op if nothing reads the gradient it contributes.

    Args:
        owner: The gradient of the op.
        step: The replacement, for the message.
        body: The body that has the op.

    Raises:
        UnsupportedError: Nothing reads it.
    """
    if _is_unread(owner, body):
        raise UnsupportedError(
            f"In graphs TensorFlow propagates no gradient through {owner.forward.name!r} "
            f"({owner.forward.type}), so the gradient of its replacement would be lost",
            where=step.where,
            fix=NO_PLACE,
        )
