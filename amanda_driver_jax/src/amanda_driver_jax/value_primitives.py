"""Primitives that edit values and show gradients, with each rule that a transformation asks for.

They never change what JAX may do with a program: they can be differentiated in both modes,
transposed, mapped, evaluated in parts and compiled. Their binders run inside `PLAIN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from amanda_driver_jax import jax_internals as internals

__all__ = ["GradientTap", "edited", "tapped"]


# An edit: a program of some values that returns new ones for some of them. The gradient of a new
# value goes straight to the old one.

_edit = Primitive("amanda_edit")
_edit.multiple_results = True


def edited(
    run: Callable[..., Sequence[tuple[int, Any]]], values: Sequence[Any]
) -> list[tuple[int, Any]]:
    """Trace an edit into the program, and return the positions of new values with these.

    Args:
        run: Returns positions and new values, of the same shapes and dtypes. It is called once.
        values: Its arguments.
    """
    places: list[int] = []

    def program(*given: Any) -> list[Any]:
        changes = list(run(*given))
        places.extend(place for place, _ in changes)
        return [new for _, new in changes]

    traced = jax.make_jaxpr(program)(*values)
    if not places and not traced.effects:
        return []
    found = _bind(traced, values, tuple(places))
    return list(zip(places, found, strict=True))


def _bind(traced: Any, values: Sequence[Any], places: tuple[int, ...]) -> Sequence[Any]:
    count = len(traced.consts)
    operands = (*traced.consts, *values)
    found: Sequence[Any] = _edit.bind(*operands, program=traced, count=count, places=places)
    return found


def _run_edit(*operands: Any, program: Any, count: int, places: tuple[int, ...]) -> Sequence[Any]:
    return internals.evaluate(program, operands[:count], operands[count:])


def _edit_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    found = _edit.bind(*primals, **params)
    return found, [tangents[params["count"] + place] for place in params["places"]]


def _edit_transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    found: list[Any] = [None] * len(operands)
    for place, cotangent in zip(params["places"], cotangents, strict=True):
        if ad.is_undefined_primal(operands[params["count"] + place]):
            found[params["count"] + place] = cotangent
    return found


def _batch_edit(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    places = tuple(params["count"] + place for place in params["places"])
    pairs = list(zip(operands, axes, strict=True))
    size = next(value.shape[axis] for value, axis in pairs if axis is not None)
    # A new value has the shape of the old one, whose gradient it passes on.
    for place in places:
        pairs[place] = batching.bdim_at_front(*pairs[place], size), 0
    operands = [value for value, _ in pairs]
    mapped = jax.vmap(lambda *given: _run_edit(*given, **params), tuple(axis for _, axis in pairs))
    found = _bind(jax.make_jaxpr(mapped)(*operands), operands, places)
    return found, [0] * len(found)


_edit.def_impl(_run_edit)
_edit.def_effectful_abstract_eval(
    lambda *_, program, **__: (list(program.out_avals), program.effects)
)
ad.primitive_jvps[_edit] = _edit_jvp
ad.primitive_transposes[_edit] = _edit_transpose
batching.primitive_batchers[_edit] = _batch_edit
mlir.register_lowering(_edit, mlir.lower_fun(_run_edit, multiple_results=True))


# A tap: the tangents themselves. It acts where JAX transposes it, on their cotangents.

_tap = Primitive("amanda_tap")
_tap.multiple_results = True


class GradientTap(Protocol):
    """Called where cotangents pass a tap."""

    def pulled(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return the cotangents that go on."""

    def pushed(self) -> None:
        """Note that tangents are computed, in forward mode, where no cotangents will pass."""


def tapped(tangents: Sequence[Any], tap: GradientTap) -> list[Any]:
    """Return tangents whose cotangents pass a tap."""
    return list(_tap.bind(*tangents, tap=tap, axes=())) if tangents else []


def _run_tap(*tangents: Any, tap: GradientTap, **_: Any) -> list[Any]:
    tap.pushed()
    return list(tangents)


def _tap_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return _tap.bind(*primals, **params), list(tangents)


def _tap_transpose(
    cotangents: Sequence[Any], *tangents: Any, tap: GradientTap, axes: Any
) -> list[Any]:
    run: Callable[..., Any] = lambda *given: tuple(tap.pulled(given))  # noqa: E731
    for mapped in axes:
        run = jax.vmap(run, mapped, mapped)
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return list(cotangents)
    found = run(*map(ad.instantiate_zeros, cotangents))
    pairs = zip(tangents, found, strict=True)
    return [new if ad.is_undefined_primal(tangent) else None for tangent, new in pairs]


def _batch_tap(tangents: Sequence[Any], axes: Sequence[Any], /, **params: Any) -> Any:
    params = {**params, "axes": (*params["axes"], tuple(axes))}
    return _tap.bind(*tangents, **params), axes


_tap.def_impl(_run_tap)
_tap.def_abstract_eval(lambda *avals, **_: list(avals))
ad.primitive_jvps[_tap] = _tap_jvp
ad.primitive_transposes[_tap] = _tap_transpose
batching.primitive_batchers[_tap] = _batch_tap
mlir.register_lowering(_tap, mlir.lower_fun(_run_tap, multiple_results=True))
