"""Rewriting of matches in graphs, which happens before anything runs.

There are two ways. If the rule has a `head`, the first operator computes everything and the others
pass the result on. Otherwise the inner operators pass on their inputs, and the last one computes
the replacement. The dtype of a graph operator's output is fixed, so the inputs are packed into one
vector of that dtype. Imports TensorFlow only when needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_core.engine.action import staged
from amanda_tools.graph.model import Graph, Source
from amanda_tools.kit.tensors.types import TensorType
from amanda_tools.rewriting.matches import Match, Role, value_at
from amanda_tools.rewriting.patterns import Place, edges_at
from amanda_tools.rewriting.rules import Matched, Taken

__all__ = ["constants_of", "packed", "prepare", "replacement_of", "unpacked"]

Constants = Mapping[int, Mapping[str, Any]]
#: Dtypes of vectors into which the inputs of an operator can be packed.
_CARRYING = ("float32", "float64")
#: A size is packed as two numbers below this, which single precision represents exactly.
_HALF = 1 << 18


def constants_of(context: OpContext, variables: bool) -> dict[str, Any]:
    """Return the attributes and known inputs of an operator, by name.

    Args:
        context: Context of the operator.
        variables: Treat the current values of variables as known.
    """
    found = dict(context.attrs)
    inputs = context.get_inputs() or ()
    for (position, name), given in zip(enumerate(context.input_names), inputs, strict=False):
        if variables or getattr(getattr(given, "op", None), "type", "") == "Const":
            value = context.value(position)
            if value is not None:
                found[name] = value
    return found


def prepare(match: Match, constants: Constants) -> str | None:
    """Decide how a match is rewritten.

    Args:
        match: The match.
        constants: Op id -> attributes and known inputs, by name.

    Returns:
        The reason why the match cannot be rewritten, or None.
    """
    tail = match.roles[0].op
    if any(edge.output not in (0, None) for edge in match.graph.edges_from(tail)):
        return f"{tail.name} returns more than one value"
    if match.rule.head is None:
        return _prepare_handing_on(match, constants)
    for role in match.roles[:-1]:
        known = constants.get(role.op.id, {})
        for name, position in zip(role.op.input_names, range(len(role.op.inputs)), strict=False):
            if position not in role.links and name not in known:
                return f"{name} of {role.op.name} is not constant"
    if any(len(role.links) > 1 for role in match.roles):
        return "its operators are not in a row"
    head = match.rule.head({role.name: constants[role.op.id] for role in match.roles})
    if isinstance(head, str):
        return head
    match.head = staged(head)
    return None


def replacement_of(role: Role) -> Callable[..., Any]:
    """Return a staged function that replaces the operator of `role` in one graph.

    The match must have been prepared.
    """
    match, number = role.match, len(role.op.outputs)
    if match.head is not None:
        if role is match.roles[-1]:
            match.report.rewritten += 1
            return match.head
        return staged(lambda *inputs: _handed_on(inputs, number))
    if not role.is_tail:
        return staged(lambda *inputs: packed([value_at(inputs, at) for at in role.carried]))
    noted = False

    def whole(*inputs: Any) -> Any:
        nonlocal noted
        result, reason = _whole(role, inputs)
        if reason is None:
            match.report.rewritten += not noted
        elif not noted:
            match.fell_back(reason)
        noted = True  # Count once: the gradient computes it again.
        return result

    return staged(whole)


def _handed_on(inputs: Sequence[Any], number: int) -> Any:
    """Return the first input unchanged, and arbitrary values for outputs that nothing reads."""
    if number == 1:
        return inputs[0]
    others = [*inputs[1:], *[inputs[-1]] * number]
    return [inputs[0], *others[: number - 1]]


# Passing on the inputs of operators.


def _prepare_handing_on(match: Match, constants: Constants) -> str | None:
    for role in match.roles:
        known = constants.get(role.op.id, {})
        role.constants = {}
        role.carried = []
        for place, kind in _places(role):
            name = role.op.input_names[place] if isinstance(place, int) else ""
            if name in known and _is_constant(match.graph, role, place):
                role.constants[place] = known[name]
                continue
            role.carried.append(place)
            if not role.is_tail and place not in role.links:
                reason = _not_carried(kind, role)
                if reason is not None:
                    return reason
        if not role.is_tail and _type_of(role) != _type_of(match.roles[0]):
            return f"{role.op.name} returns another dtype than {match.roles[0].op.name}"
    return None


def _type_of(role: Role) -> str:
    """Return the dtype of an operator's first output."""
    given = role.op.outputs[0] if role.op.outputs else None
    return given.dtype if isinstance(given, TensorType) else ""


def _not_carried(kind: TensorType | None, role: Role) -> str | None:
    wanted = _type_of(role)
    if wanted not in _CARRYING or len(role.op.outputs) != 1:
        return f"{role.op.name} returns {wanted or 'no tensor'}, which cannot carry its inputs"
    if kind is None or kind.shape is None:
        return f"the rank of an input of {role.op.name} is not known"
    if kind.dtype not in (wanted, "bool"):
        return f"{role.op.name} takes {kind.dtype}, which {wanted} cannot carry"
    return None


def _places(role: Role) -> Iterator[tuple[Place, TensorType | None]]:
    for position, kind in enumerate(role.op.inputs):
        if isinstance(kind, list):
            yield from (((position, item), one) for item, one in enumerate(kind))
        else:
            yield position, kind


def _is_constant(graph: Graph, role: Role, place: Place) -> bool:
    nodes = [graph.nodes[edge.producer] for edge in edges_at(graph, role.op, place)]
    return bool(nodes) and all(
        isinstance(node, Source) and node.kind == "constant" for node in nodes
    )


def packed(values: Sequence[Any]) -> Any:
    """Pack values into one vector: their sizes, then their elements."""
    import tensorflow as tf

    dtype = next(value.dtype for value in values if value.dtype.is_floating)
    sizes = tf.concat([tf.shape(value) for value in values], 0)
    header = tf.cast(tf.concat([sizes // _HALF, sizes % _HALF], 0), dtype)
    return tf.concat([header, *(tf.reshape(tf.cast(v, dtype), [-1]) for v in values)], 0)


def unpacked(vector: Any, kinds: Sequence[TensorType]) -> list[Any]:
    """Unpack the values from a vector."""
    import tensorflow as tf

    axes = sum(len(kind.shape or ()) for kind in kinds)
    header = tf.cast(vector[: 2 * axes], tf.int32)
    sizes = header[:axes] * _HALF + header[axes:]
    start, axis = tf.constant(2 * axes), 0
    found = []
    for kind in kinds:
        rank = len(kind.shape or ())
        shape = sizes[axis : axis + rank]
        end = start + tf.reduce_prod(shape)
        value = tf.reshape(vector[start:end], shape)
        value.set_shape(kind.shape)
        found.append(value > 0.5 if kind.dtype == "bool" else value)
        start, axis = end, axis + rank
    return found


class _Spread(NamedTuple):
    role: Role
    taken: Taken
    inside: Mapping[Place, _Spread]


def _whole(role: Role, inputs: Sequence[Any]) -> tuple[Any, str | None]:
    """Return the outputs of the last operator, and the reason if they are not rewritten."""
    match = role.match
    whole = _spread(role, {place: value_at(inputs, place) for place in role.carried})
    ops: dict[str, Taken] = {}
    values: dict[str, Any] = {}
    left = [whole]
    while left:
        at = left.pop()
        ops[at.role.name] = at.taken
        for name, place in at.role.inputs:
            values.setdefault(name, value_at(at.taken.inputs, place))
        left += at.inside.values()
    found = Matched(role.op.name, ops, values)
    reason = match.rule.guard(found)
    return (match.rule.replacement(found) if reason is None else _computed(whole)), reason


def _spread(role: Role, carried: Mapping[Place, Any]) -> _Spread:
    roles = {one.op.index: one for one in role.match.roles}
    inside: dict[Place, _Spread] = {}
    for place, index in role.links.items():
        inner = roles[index]
        kinds = dict(_places(inner))
        vector = TensorType("", (None,))
        wanted = [vector if at in inner.links else kinds[at] or vector for at in inner.carried]
        values = unpacked(carried[place], wanted)
        inside[place] = _spread(inner, dict(zip(inner.carried, values, strict=True)))
    known = {**carried, **role.constants}
    inputs = [
        [known[position, item] for item in range(len(kind))]
        if isinstance(kind, list)
        else known.get(position)
        for position, kind in enumerate(role.op.inputs)
    ]
    taken = Taken(role.op.word or role.op.type, inputs, role.names, role.attrs, _run_of(role))
    return _Spread(role, taken, inside)


def _computed(at: _Spread) -> list[Any]:
    """Return the outputs that an operator computes itself, after those before it."""
    inputs = [list(one) if isinstance(one, list) else one for one in at.taken.inputs]
    for place, inner in at.inside.items():
        value = _computed(inner)[0]
        if isinstance(place, int):
            inputs[place] = value
        else:
            inputs[place[0]][place[1]] = value
    found: list[Any] = at.taken.run(inputs)
    return found


def _run_of(role: Role) -> Callable[[Sequence[Any]], Any]:
    def run(inputs: Sequence[Any]) -> list[Any]:
        import tensorflow as tf

        function = getattr(tf.raw_ops, role.op.type)
        wanted = inspect.signature(function).parameters
        attributes = {key: value for key, value in role.attrs.items() if key in wanted}
        result = function(**dict(zip(role.names, inputs, strict=True)), **attributes)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    return run
