"""Executing the steps of a plan: now on concrete values, or as a part of a traced program."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from amanda_core import Step
from amanda_driver_jax._host import Host, stopped
from amanda_driver_jax._jax_internals import is_top_level
from amanda_driver_jax._trace_keys import LOCAL, busy, plain
from amanda_driver_jax._values import (
    cast_like,
    concrete,
    is_concrete,
    is_differentiable,
    shape_of,
    straight_through,
)

__all__ = ["fold", "isolated", "known", "note_copy", "original", "shown"]


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Compute inside `with` for real, whatever is being traced or differentiated."""
    with plain(), jax.core.eval_context():
        yield


def shown(values: Sequence[Any], staging: bool) -> list[Any]:
    """Return the values that a tool sees: tracers in a program, else the arrays under them."""
    return list(values) if staging else [concrete(value) for value in values]


#: Trace -> copies that were made in it of a value, with the same shape and dtype: the id of each,
#: and the copy and its original.
_COPIES: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def note_copy(new: Any, old: Any) -> None:
    """Note that an operator has copied a value, as JAX does to convert it to its own dtype."""
    new, old = concrete(new), concrete(old)
    if not is_top_level() and shape_of(new) == shape_of(old):
        _COPIES.setdefault(LOCAL.trace, {})[id(new)] = new, old


def original(value: Any) -> Any:
    """Return the value of which a value is a copy, or itself."""
    value = concrete(value)
    copies = _COPIES.get(LOCAL.trace, {}) if LOCAL.trace is not None else {}
    while id(value) in copies:
        value = copies[id(value)][1]
    return value


def known(value: Any) -> Any:
    """Return the array that a value is, or that was passed for it to the traced function."""
    value = original(value)
    for arguments in reversed(LOCAL.arguments):
        if id(value) in arguments:
            value = concrete(arguments[id(value)][1])
    return value if is_concrete(value) else None


def fold(host: Host, steps: Iterable[Step], values: Sequence[Any], staging: bool) -> list[Any]:
    """Execute steps in order, each on the values that the earlier ones returned.

    Args:
        host: Calls routines out of programs.
        steps: The steps.
        values: The values; None for one that does not exist.
        staging: Whether a program is traced, so that there are no concrete values.
    """
    new = list(values)
    for step in steps:
        action = step.action
        if not staging and not action.autodiff:
            with isolated():
                changes = step(shown(new, staging))
        elif not staging or action.staged:
            given = new if action.autodiff else [v if v is None else stopped(v) for v in new]
            changes = step(given)
        elif action.observe or action.positions == ():
            host.observe(step, new)
            continue
        else:
            changes = host.edit(step, new)
        for position, value in changes:
            new[position] = _edited(new[position], value, action.autodiff)
    return new


def _edited(old: Any, new: Any, autodiff: bool) -> Any:
    with busy():
        new = cast_like(new, old)
        if autodiff or not isinstance(old, jax.core.Tracer) or not is_differentiable(old):
            return new
        return straight_through(old, new)
