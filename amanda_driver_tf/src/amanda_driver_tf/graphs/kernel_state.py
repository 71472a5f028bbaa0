"""State that an op's kernel keeps between the runs of a session.

A session identifies this state by the name of the node: a resource (a queue, a table, an iterator)
or the position in a sequence of random numbers. A clone would start with a state of its own, so
such ops are cloned only if nothing else is possible.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.body import Body, Node
from amanda_driver_tf.tensorflow_internals.modules import op_def_registry
from amanda_driver_tf.tensorflow_internals.objects import control_flow_context, is_reference

__all__ = ["draws", "keeps_state", "kept_as_they_are", "refuse_second"]

# Marked as stateful by TensorFlow, though running one twice changes nothing.
_REPEATABLE = frozenset({"Assert", "ReadVariableOp"})


@functools.cache
def _attributes(op_type: str) -> frozenset[str]:
    definition = op_def_registry.get(op_type)
    if definition is None or not definition.is_stateful:
        return frozenset()
    return frozenset(attribute.name for attribute in definition.attr)


def draws(op_type: str) -> bool:
    """Return True if ops of a type draw random numbers from a sequence of their own."""
    return {"seed", "seed2"} <= _attributes(op_type)


def _owns_resource(op_type: str) -> bool:
    return "shared_name" in _attributes(op_type)


def keeps_state(op_type: str) -> bool:
    """Return True if kernels of an op type keep a state that no edge of the graph shows."""
    return draws(op_type) or _owns_resource(op_type)


def kept_as_they_are(body: Body, nodes: Sequence[Node], dirty: set[int]) -> list[Node]:
    """Return those of `nodes` that need not be cloned together with the dirty nodes.

    All of `nodes` only have control inputs from dirty nodes. They run in the original graph, so the
    originals of their control inputs run, too, besides the clones. This is harmless if these have
    no side effects.
    """
    ops = {id(node.op) for node in body.nodes if id(node) in dirty}
    return [
        node
        for node in nodes
        if control_flow_context(node.op) is None and not _has_effects_ahead(node, ops)
    ]


def _has_effects_ahead(node: Node, dirty: set[int]) -> bool:
    seen: set[int] = set()
    waiting = [*node.op.control_inputs, *(tensor.op for tensor in node.op.inputs)]
    while waiting:
        op = waiting.pop()
        if id(op) in seen:
            continue
        seen.add(id(op))
        if id(op) in dirty and _has_effect(op):
            return True
        waiting += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    return False


def _has_effect(op: Any) -> bool:
    if any(map(is_reference, op.inputs)):
        return True  # It may write to the reference, but is not marked as stateful.
    if control_flow_context(op) is not None:
        return True  # Whether it runs is decided by its control inputs.
    return bool(op.op_def.is_stateful) and not (op.type in _REPEATABLE or keeps_state(op.type))


def refuse_second(node: Node) -> None:
    """Refuse to clone an op whose clone would create a second resource.

    Raises:
        UnsupportedError: The resource is identified by the name of the node.
    """
    if _owns_resource(node.op_type) and not node.op.node_def.attr["shared_name"].s:
        raise UnsupportedError(
            "An edit would create a second resource besides the session's own",
            where=f"{node.op_type} {node.name!r}",
            fix="Give the resource a shared_name, or do not edit what its op depends on",
        )
