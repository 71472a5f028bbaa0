"""Values of JAX: arrays, tracers and keys.

Owns what is known of a value while a function is traced: of what it is a copy, and which argument
it is. Owns the edit whose gradient goes straight through to the old value.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.dtypes import float0

from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.trace_keys import LOCAL, PLAIN, Traced, evaluated


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
    # What JAX would make of an array of NumPy is inexact if the array is.
    dtype = getattr(getattr(value, "aval", value), "dtype", None)
    return _is_inexact(dtype or dtype_of(value))


@functools.lru_cache(64)
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.inexact))


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
    """Return a new value in the dtype of the one that it replaces, weak if that is.

    It is also sharded, and inside a `jax.shard_map` varies, along the same axes of the mesh, which
    what came from the host is not.
    """
    if _is_key(dtype_of(old)):
        return new
    new = internals.convert(new, dtype_of(old), getattr(jax.typeof(old), "weak_type", False))
    sharding = getattr(jax.typeof(old), "sharding", None)
    if sharding is not None and any(sharding.spec) and sharding != jax.typeof(new).sharding:
        new = jax.sharding.reshard(new, sharding)
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
    _MAPPED.axes = {id(value): found for value, found in zip(values, axes, strict=False) if found}
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


class Shown(NamedTuple):
    """The part of an array that a value shows, maybe in another dtype.

    Attributes:
        source: The array.
        axes: The array's axis that each axis of the value is; None for a new one of size 1.
        places: For each axis of the array the index or the indices of the part.
        exact: False if it shows one of several parts in each of the calls that `jax.vmap` maps.
    """

    source: Any
    axes: tuple[int | None, ...]
    places: tuple[int | range, ...]
    exact: bool = True

    def followed_by(self, part: Shown) -> Shown:
        """Return which part of this one's source a part of this value shows."""
        places = list(self.places)
        for axis, place in zip(self.axes, part.places, strict=True):
            if axis is None:
                continue
            along = places[axis]
            assert isinstance(along, range), "An axis of a value is not one index of its source."
            if isinstance(place, int):
                places[axis] = along[place]
            else:
                places[axis] = along[place.start : place.stop : place.step]
        axes = tuple(None if axis is None else self.axes[axis] for axis in part.axes)
        return Shown(self.source, axes, tuple(places), self.exact and part.exact)


def _whole(value: Any) -> Shown:
    shape = getattr(value, "shape", ())
    return Shown(value, tuple(range(len(shape))), tuple(map(range, shape)))


class _Copy(NamedTuple):
    """What a value is a copy of.

    Attributes:
        new: The copy, held weakly.
        source: Returns the first value that it is a copy of; None if that has died.
        part: What it shows of that, which is not held here.
        steps: What was done to it, in order.
    """

    new: weakref.ref[Any]
    source: Callable[[], Any]
    part: Shown
    steps: tuple[Callable[[Any], Any], ...]

    def made_of(self, value: Any) -> Any:
        """Return `value` after the steps by which the copy was made of its source."""
        for step in self.steps:
            value = step(value)
        return value


#: By the id of the copy.
_COPIES: dict[int, _Copy] = {}


def _copy_of(value: Any) -> _Copy | None:
    copy = _COPIES.get(id(value))
    return copy if copy is not None and copy.new() is value else None


def note_copy(new: Any, old: Any, axes: Sequence[int] | None = None) -> None:
    """Note that an operator has copied a value, in another dtype or order of axes.

    Args:
        new: The copy.
        old: The value.
        axes: The value's axis that each axis of the copy is; None if they are the same.
    """
    new, old = concrete(new), concrete(old)
    # JAX gives the value itself where there is nothing to convert.
    if new is old or not isinstance(old, jax.Array):
        return
    is_equal = axes is None and shape_of(new) == shape_of(old)
    is_real = is_differentiable(new) and is_differentiable(old)
    if not is_equal and (not is_real or (axes is None and new.shape != old.shape)):
        return
    dtype = new.dtype

    def copied(value: Any) -> Any:
        return (value if axes is None else jnp.transpose(value, axes)).astype(dtype)

    order = tuple(range(old.ndim)) if axes is None else tuple(axes)
    _note(new, old, _whole(old)._replace(axes=order), () if is_equal else (copied,))


def note_reshape(new: Any, old: Any) -> None:
    """Note that a value has the elements of another one, if only axes of size 1 differ."""
    new, old = concrete(new), concrete(old)
    if new is old or not isinstance(old, jax.Array) or not is_differentiable(old):
        return
    along = [axis for axis, size in enumerate(old.shape) if size != 1]
    if [size for size in new.shape if size != 1] != [old.shape[axis] for axis in along]:
        return
    left, shape = iter(along), new.shape
    axes = tuple(None if size == 1 else next(left) for size in shape)
    _note(new, old, _whole(old)._replace(axes=axes), (lambda value: value.reshape(shape),))


def note_part(new: Any, old: Any, indices: Sequence[int | slice]) -> None:
    """Note that a value is a part of another one, which has an index along each axis of that."""
    new, old = concrete(new), concrete(old)
    if new is old or not isinstance(old, jax.Array) or not is_differentiable(old):
        return
    places = tuple(range(size)[index] for size, index in zip(old.shape, indices, strict=True))
    axes = tuple(n for n, place in enumerate(places) if isinstance(place, range))
    index = tuple(indices)
    _note(new, old, Shown(old, axes, places), (lambda value: value[index],))


def layer(stack: Any, index: int, axis: int = 0) -> Any:
    """Return one of the arrays that are stacked along an axis, and note that it is one."""
    with PLAIN:
        new = jax.lax.index_in_dim(stack, index, axis, keepdims=False)
        places: list[int | slice] = [slice(None)] * new.ndim
        places.insert(range(new.ndim + 1)[axis], index)
        note_part(new, stack, places)
    return new


def _note(new: Any, old: Any, part: Shown, steps: tuple[Callable[[Any], Any], ...]) -> None:
    before = _copy_of(old)
    source = _getter(old)
    if before is not None:
        source, steps = before.source, (*before.steps, *steps)
        part = before.part.followed_by(part)
    key, pop = id(new), _COPIES.pop  # At its end the interpreter takes names of modules away.
    found = weakref.ref(new, lambda _: pop(key, None))
    _COPIES[key] = _Copy(found, source, part._replace(source=None), steps)


class _Sources(dict[int, tuple[weakref.ref[Any], tuple[Callable[[], Any], ...]]]):
    """By the id of a value that was computed: the value, and the arrays that it was computed from.

    Arrays that have died are looked for once there are many: to be told of each takes longer.
    """

    many = 4096

    def forget_dead(self) -> None:
        for key, found in tuple(self.items()):
            if found[0]() is None:
                self.pop(key, None)
        self.many = max(_Sources.many, 2 * len(self))


_SOURCES = _Sources()
#: A merged weight has few sources. What has more of them is not followed.
_MOST_SOURCES = 4


def _is_number(value: Any) -> bool:
    # To ask for the size takes longer, and an array of JAX asks the same for its shape.
    shape = getattr(getattr(value, "aval", value), "shape", ())
    return len(shape) == shape.count(1)


def sources_of(value: Any) -> tuple[Any, ...]:
    """Return the arrays that a value was computed from, or shows; none if they are not known.

    Numbers do not count.
    """
    if _is_number(value):
        return ()
    source = origin(value).source
    found = _SOURCES.get(id(source))
    if found is None or found[0]() is not source:
        return (source,)
    return tuple(array for get in found[1] if (array := get()) is not None)


def note_computed(new: Any, values: Sequence[Any]) -> None:
    """Note of which arrays an operator has computed a value, unless these are many."""
    new = concrete(new)
    # As `_is_number` and `is_differentiable`, with fewer calls: each operator comes by here.
    aval = getattr(new, "aval", new)
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    if len(shape) == shape.count(1) or not _is_inexact(dtype or dtype_of(new)):
        return
    sources: dict[int, Callable[[], Any]] = {}
    for value in values:
        shape = getattr(getattr(value, "aval", value), "shape", ())
        if len(shape) == shape.count(1):
            continue
        follows = (key := id(value)) in _SOURCES or key in _COPIES or isinstance(value, Tracer)
        for array in sources_of(value) if follows else (value,):
            if not isinstance(array, jax.Array):
                return
            sources[id(array)] = _getter(array)
    key, pop = id(new), _SOURCES.pop
    if 0 < len(sources) <= _MOST_SOURCES and key not in sources:
        if len(_SOURCES) >= _SOURCES.many:
            _SOURCES.forget_dead()
        # Sources of a tracer are tracers, which must not live longer than what is made of them.
        found = weakref.ref(new, (lambda _: pop(key, None)) if isinstance(new, Tracer) else None)
        _SOURCES[key] = found, tuple(sources.values())


def _getter(array: Any) -> Callable[[], Any]:
    # An array that is not a parameter of anything need not live as long as what is made of it.
    return (lambda: array) if isinstance(array, Tracer) else weakref.ref(array)


def original(value: Any) -> Any:
    """Return the value of which a value is a copy, or itself."""
    value = concrete(value)
    copy = _copy_of(value)
    source = copy.source() if copy is not None and not copy.steps else None
    return value if source is None else source


def origin(value: Any) -> Shown:
    """Return the array that a value shows, in another dtype or order of axes, or a part of it.

    A value in a function that runs in place, or is traced for its parameters, is what was passed.
    """
    value = concrete(value)
    copy = _copy_of(value)
    source = None if copy is None else copy.source()
    if copy is not None and source is not None:
        shown = copy.part._replace(source=source)
    else:
        shown = _whole(value)
    mapped_value = internals.mapped_value(shown.source)
    if mapped_value is not None:
        stack, axis = mapped_value
        axes = tuple(n for n in range(stack.ndim) if n != axis)
        outer = Shown(stack, axes, tuple(map(range, stack.shape)), axis is None)
        return origin(stack).followed_by(outer).followed_by(shown)
    found = argument(shown.source)
    if found is None:
        return shown
    traced, place = found
    passed = traced.values[place]
    if not (traced.in_place or traced.layer or isinstance(concrete(passed), Tracer)):
        return shown
    return origin(passed).followed_by(shown)


def argument(value: Any) -> tuple[Traced, int] | None:
    """Return the function that is being traced and has the value as an argument, and its number."""
    for traced in reversed(LOCAL.arguments):
        if traced.inside is None:
            place = internals.argument_of(value, traced.around, traced.values)
        else:
            places = (n for n, given in enumerate(traced.inside) if given is value)
            place = next(places, None) if isinstance(value, Tracer) else None
        if place is not None:
            return traced, place
    return None


def on_devices(values: Sequence[Any], params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a `jax.shard_map` so that `argument` knows what its function gets.

    Arguments that its devices divide are left out: on each device there is another part.

    Args:
        values: The arguments.
        params: The parameters, as JAX makes them.
    """
    (function,) = params["subfuns"]
    whole = [internals.is_whole(spec) for spec in params["in_specs"]]

    def noted(*given: Any) -> Any:
        inside = [concrete(own) if w else None for own, w in zip(given, whole, strict=True)]
        with Traced(internals.current_trace(), values, True, inside=inside):
            return function(*given)

    return {**params, "subfuns": (noted,)}


def known(value: Any) -> Any:
    """Return the array that a value is, or that was passed for it to the traced function.

    A copy in another dtype or order of axes, or of a part, is made of the array that was passed.
    """
    value = concrete(value)
    if is_concrete(value):
        return original(value)
    copy = _copy_of(value)
    source = None if copy is None else copy.source()
    if copy is not None and source is not None:
        array = known(source)
        return array if array is None else evaluated(copy.made_of, array)
    passed = argument(value)
    return None if passed is None else known(passed[0].values[passed[1]])
