"""Gradient routines of eager ops in a graph that TensorFlow builds for a vectorized Jacobian.

pfor vectorizes the backward pass of one row, and runs an op that it cannot vectorize in a loop over
the rows. So a node that calls the routine gets the gradients of one row after the other, as the
routine does without pfor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Session, Step
from amanda_core.interface import EditError
from amanda_driver_tf.gradients.eager.edits import call_step, edited_gradient
from amanda_driver_tf.insertion.host_functions import Listener, register
from amanda_driver_tf.tensorflow_internals.modules import ops, record
from amanda_driver_tf.tensorflow_internals.objects import needs_reader
from amanda_driver_tf.tensorflow_internals.tapes import call_unrecorded, no_tape

__all__ = ["hosted", "is_vectorised", "keep_while_built"]

_KEPT = "_amanda_hosted"


def is_vectorised() -> bool:
    """Return True if pfor's loop body is being built, whose ops pfor makes again."""
    return any("loop_body" in (graph.get_name_scope() or "").split("/") for graph in _graphs())


def _graphs() -> list[Any]:
    graph, found = ops.get_default_graph(), []
    while graph is not None:
        found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found


def keep_while_built(what: Any) -> None:
    """Keep what a node needs alive for as long as any graph that may have the node."""
    for graph in _graphs():
        setattr(graph, _KEPT, [*getattr(graph, _KEPT, ()), what])


def hosted(
    session: Session, step: Step, values: Sequence[Any], is_applied: Callable[[Step], bool]
) -> list[Any]:
    """Return the gradients as a step on the host leaves them when the graph runs.

    Args:
        session: The session whose tool the step belongs to.
        step: The step.
        values: The gradients; those of an input that is a list are a list.
        is_applied: Returns True if the step's tool is applied when the graph runs.
    """
    parts = tf.nest.flatten(list(values), expand_composites=True)
    places = [index for index, part in enumerate(parts) if part is not None]
    tensors = [tf.convert_to_tensor(parts[index]) for index in places]
    if not tensors:
        return list(values)

    def run(given: list[Any]) -> list[Any]:
        if not session.enabled or not is_applied(step):
            return given
        whole: list[Any] = [None] * len(parts)
        for place, value in zip(places, given, strict=True):
            whole[place] = value
        before = tf.nest.pack_sequence_as(list(values), whole, expand_composites=True)
        after = list(before)
        for position, new in call_step(step, before):
            after[position] = edited_gradient(before[position], new, step)
        made = tf.nest.flatten(after, expand_composites=True)
        kinds = [value is None for value in made]
        if kinds != [part is None for part in parts]:
            raise EditError(
                "A routine changed which gradients there are, or their form",
                where=step.where,
                fix="Return gradients of the same form, or pass experimental_use_pfor=False",
            )
        return [made[place] for place in places]

    dtypes = [tensor.dtype.as_datatype_enum for tensor in tensors]
    host = register(run, Listener.of(session), dtypes)
    keep_while_built(host)
    made = call_unrecorded(
        lambda: tf.raw_ops.EagerPyFunc(input=tensors, token=host.token, Tout=dtypes)
    )
    needs_reader(made[0].op)
    for index, (old, new) in enumerate(zip(tensors, made, strict=True)):
        new.set_shape(old.shape)
        if not no_tape():
            record.record_operation("AmandaEdit", [new], [old], _straight, _straight)
        parts[places[index]] = new
    return list(tf.nest.pack_sequence_as(list(values), parts, expand_composites=True))


def _straight(*gradients: Any) -> list[Any]:
    return list(gradients)
