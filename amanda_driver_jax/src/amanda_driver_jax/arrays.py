"""Values of JAX: arrays, tracers and keys.

Owns what is known of a value while a function is traced: of what it is a copy, and which argument
it is. Owns the edit whose gradient goes straight through to the old value.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.dtypes import float0

from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.trace_keys import LOCAL, PLAIN


def concrete(value: Any) -> Any:
    """Return the array under the tracers of differentiation, or the innermost other tracer."""
    while isinstance(value, Tracer) and hasattr(value, "primal"):
        value = value.primal
    return value


def is_concrete(value: Any) -> bool:
    """Return True if a value is known now."""
    return not isinstance(concrete(value), Tracer)


def dtype_of(value: Any) -> Any:
    """Return the dtype that JAX gives a value."""
    return value.dtype if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value).dtype


def is_differentiable(value: Any) -> bool:
    """Return True if a value may have a gradient: floating-point and complex numbers."""
    return bool(jnp.issubdtype(dtype_of(value), np.inexact))


def _is_key(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def as_numbers(values: Any) -> list[Any]:
    """Return values without those that are None, and random keys as their numbers."""
    leaves = jax.tree.leaves(values)
    return [jax.random.key_data(leaf) if _is_key(dtype_of(leaf)) else leaf for leaf in leaves]


def from_numbers(numbers: Sequence[Any], shapes: Any) -> Any:
    """Return the values of these shapes, of which `as_numbers` returned the numbers."""
    leaves, tree = jax.tree.flatten(shapes)
    found = [
        jax.random.wrap_key_data(n, dtype=leaf.dtype) if _is_key(leaf.dtype) else jnp.asarray(n)
        for n, leaf in zip(numbers, leaves, strict=True)
    ]
    return tree.unflatten(found)


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a value."""
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def shapes_of(values: Sequence[Any], keep: Callable[[Any], bool] = lambda _: True) -> list[Any]:
    """Return the shape and dtype of each value; None for None and for what `keep` leaves out."""
    return [None if v is None or not keep(v) else shape_of(v) for v in values]


def cast_like(new: Any, old: Any) -> Any:
    """Return a new value in the dtype of the one that it replaces.

    Inside a `jax.shard_map` it also varies along the same axes of the mesh, which what came from
    the host does not.
    """
    if _is_key(dtype_of(old)):
        return new
    new = jnp.asarray(new, dtype_of(old))
    axes = _varying_axes(old) - _varying_axes(new)
    return jax.lax.pcast(new, tuple(axes), to="varying") if axes else new


def _varying_axes(value: Any) -> frozenset[Any]:
    return frozenset(getattr(getattr(jax.typeof(value), "mat", None), "varying", ()))


class _Mapped(threading.local):
    """The mapped axes of the values that a routine of this thread gets, by their ids."""

    axes: dict[int, tuple[int, ...]] = {}  # noqa: RUF012  It is replaced, and never written.


_MAPPED = _Mapped()


@contextmanager
def mapped(values: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> Iterator[None]:
    """Let `mapped_axes` know, inside ``with``, which axes of values `jax.vmap` has mapped."""
    _MAPPED.axes = {id(value): found for value, found in zip(values, axes, strict=True) if found}
    try:
        yield
    finally:
        _MAPPED.axes = {}


def mapped_axes(value: Any) -> tuple[int, ...]:
    """Return the axes of a value that a routine gets which `jax.vmap` has mapped."""
    return _MAPPED.axes.get(id(value), ())


def without_float0(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients with None for those of integers and keys, which JAX calls float0."""
    return [None if g is None or dtype_of(g) == float0 else g for g in gradients]


#: Returns its second argument. Its derivative is that of the first one.
_second = jax.custom_jvp(lambda old, new: new)
_second.defjvp(lambda primals, tangents: (_second(*primals), tangents[0]))


def straight_through(old: Any, new: Any) -> Any:
    """Return a new value in the dtype of the one that it replaces, with the gradient of that."""
    with PLAIN:
        new = cast_like(new, old)
        is_constant = not isinstance(old, Tracer) or not is_differentiable(old)
        return new if is_constant else _second(old, new)


def shown(values: Sequence[Any], staging: bool) -> list[Any]:
    """Return the values that a tool sees: tracers in a program, else the arrays under them."""
    if staging or LOCAL.trace is None:
        return list(values)
    return [concrete(value) for value in values]


#: Trace -> copies that were made in it of a value, with the same shape and dtype: the id of each,
#: and the copy and its first original.
_COPIES: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def note_copy(new: Any, old: Any) -> None:
    """Note that an operator has copied a value, as JAX does to convert it to its own dtype."""
    new, old = concrete(new), original(old)
    # JAX gives the value itself where there is nothing to convert.
    if new is old or LOCAL.trace is None or shape_of(new) != shape_of(old):
        return
    _COPIES.setdefault(LOCAL.trace, {})[id(new)] = new, old


def original(value: Any) -> Any:
    """Return the value of which a value is a copy, or itself."""
    value = concrete(value)
    copies = {} if LOCAL.trace is None else _COPIES.get(LOCAL.trace, {})
    return copies[id(value)][1] if id(value) in copies else value


def known(value: Any) -> Any:
    """Return the array that a value is, or that was passed for it to the traced function."""
    value = original(value)
    for around, arguments in reversed(LOCAL.arguments):
        place = internals.argument_of(value, around)
        if place is not None:
            value = concrete(arguments[place])
    return value if is_concrete(value) else None
