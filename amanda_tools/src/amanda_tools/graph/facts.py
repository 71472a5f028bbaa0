"""Facts about an operator that a graph records: its tensors, arguments and function."""

from __future__ import annotations

import re
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_tools.kit.tensors.types import type_of
from amanda_tools.kit.tensors.values import facts_of

__all__ = ["arguments_of", "items_of", "program_of"]

_PLAIN = frozenset({type(None), type(...), bool, int, float, complex, str, bytes})


def items_of(facts: Facts, value: Any) -> list[tuple[int | None, Any]]:
    """Return the tensors at a position; each comes with its index if the position holds a list."""
    if type(value) in _PLAIN:
        return []
    if isinstance(value, (list, tuple)):
        return [(place, item) for place, item in enumerate(value) if facts.is_tensor(item)]
    return [(None, value)] if facts.is_tensor(value) else []


def arguments_of(context: OpContext) -> dict[str, str]:
    """Return the inputs and attributes that are not tensors, as text."""
    found = {}
    facts = facts_of(context)
    names = context.input_names
    for position, value in enumerate(context.get_inputs() or ()):
        if not items_of(facts, value) and value is not None:
            name = names[position] if position < len(names) else str(position)
            found[name] = _text(facts, value)
    found.update((name, _text(facts, value)) for name, value in context.attrs.items())
    return found


def program_of(context: OpContext) -> str:
    """Return the name of the function or graph that contains an operator, if it has one."""
    op = context.get_backward_op() if context.is_backward() else context.get_op()
    name = getattr(getattr(op, "graph", None), "name", "")
    # Drop the number at the end, which counts earlier traces.
    return re.sub(r"_\d+$", "", name) if isinstance(name, str) else ""


def _text(facts: Facts, value: Any) -> str:
    if type(value) in _PLAIN:
        return repr(value)[:80]
    if isinstance(value, (list, tuple)):
        listed = ", ".join(_text(facts, item) for item in value[:16])
        return f"({listed}{', ...' if len(value) > 16 else ''})"
    if isinstance(value, slice):
        return ":".join(_text(facts, item) for item in (value.start, value.stop, value.step))
    if facts.is_tensor(value):
        return str(type_of(facts, value))
    # Only the type of users' objects: their `__str__` may be slow or have side effects.
    constant = facts.constant(value)
    return type(value).__name__ if constant is None else constant[:80]
