"""What the kernel of an op keeps from one run of a session to the next.

A session finds a kernel's state by the name of the node: a resource (a queue, a table, an iterator)
or the place in a sequence of random numbers. A clone would begin with a state of its own, so such
ops are cloned only where nothing else is possible.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from amanda_core.errors import UnsupportedError
from amanda_driver_tf._graphs.body import Body, Node
from amanda_driver_tf._tensorflow_internals.modules import op_def_registry
from amanda_driver_tf._tensorflow_internals.objects import control_flow_context, is_reference

__all__ = ["draws", "keeps_state", "kept_as_they_are", "refuse_second"]

# Stateful for TensorFlow, though running one twice changes nothing.
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
    """Return True if the kernels of an op type keep something that no edge of the graph shows."""
    return draws(op_type) or _owns_resource(op_type)


def kept_as_they_are(body: Body, nodes: Sequence[Node], dirty: set[int]) -> list[Node]:
    """Which of `nodes`, only ordered behind dirty nodes, need not be cloned with these.

    They run in the original, so whatever they are ordered behind runs as it is without tools, too,
    beside its clone. That is no harm where it has no effects.
    """
    ops = {id(node.op) for node in body.nodes if id(node) in dirty}
    return [
        node
        for node in nodes
        if control_flow_context(node.op) is None and not _has_effects_ahead(node, ops)
    ]


def _has_effects_ahead(node: Node, dirty: set[int]) -> bool:
    met: set[int] = set()
    waiting = [*node.op.control_inputs, *(tensor.op for tensor in node.op.inputs)]
    while waiting:
        op = waiting.pop()
        if id(op) in met:
            continue
        met.add(id(op))
        if id(op) in dirty and _has_effect(op):
            return True
        waiting += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    return False


def _has_effect(op: Any) -> bool:
    if any(map(is_reference, op.inputs)):
        return True  # It may write what is referred to; such ops do not count as stateful.
    if control_flow_context(op) is not None:
        return True  # Whether it runs is said by what it is ordered behind.
    return bool(op.op_def.is_stateful) and not (op.type in _REPEATABLE or keeps_state(op.type))


def refuse_second(node: Node) -> None:
    """Refuse a clone that would make a second resource.

    Raises:
        UnsupportedError: What the op makes is found by the name of its node.
    """
    if _owns_resource(node.op_type) and not node.op.node_def.attr["shared_name"].s:
        raise UnsupportedError(
            "An edit would make a resource a second time, apart from the session's own",
            where=f"{node.op_type} {node.name!r}",
            fix="Give the resource a shared_name, or do not edit what it is made from or behind",
        )
