"""Routines on the host: calls of Python out of traced programs.

Owns the callbacks and their derivatives. An exception would end the program or get lost in it, so
it is deferred, and the values stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from amanda_core import Session, Step
from amanda_core.errors import RoutineResultError
from amanda_driver_jax._jax_internals import call_host
from amanda_driver_jax._trace_keys import busy, plain
from amanda_driver_jax._values import is_differentiable, is_key, several, shape_of

__all__ = ["Host", "stopped"]

Changes = list[tuple[int, Any]]
Compute = Callable[..., Sequence[Any]]


class Host:
    """The callbacks of the programs of one store.

    Attributes:
        session: The running session of the store, or the last one.
        is_used: Whether any program has a callback.
    """

    session: Session

    def __init__(self) -> None:
        self.is_used = False

    def observe(self, step: Step, values: Sequence[Any]) -> None:
        """Add a callback to the program that only reads the values that the routine selects."""
        positions = _positions(step, values)
        if not positions and (step.action.positions is None or step.action.positions):
            return  # None of the values that the routine selects exists.

        def call(*selected: Any) -> None:
            self._run(lambda: step(_spread(positions, selected, len(values))))

        self._send(lambda receive, *v: jax.debug.callback(receive, *v), call, values, positions)

    def edit(self, step: Step, values: Sequence[Any]) -> Changes:
        """Add a callback to the program that edits values; return positions and new values."""
        positions = _positions(step, values)
        if not positions:
            return []

        def compute(*selected: Any) -> list[Any]:
            changes = dict(step(_spread(positions, selected, len(values))))
            return [changes.get(p, v) for p, v in zip(positions, selected, strict=True)]

        selected = [values[position] for position in positions]
        if not step.action.autodiff:
            selected = [stopped(value) for value in selected]
        shapes = [shape_of(value) for value in selected]
        found = self.call(step, compute, shapes, selected, keeps=True)
        return list(zip(positions, found, strict=True))

    def call(
        self,
        step: Step,
        compute: Compute,
        shapes: Sequence[Any],
        values: Sequence[Any],
        *,
        keeps: bool = False,
    ) -> Sequence[Any]:
        """Call a function on the host, differentiated on the host as well.

        Args:
            step: The step that it executes.
            compute: The function.
            shapes: Those of its results.
            values: Its arguments.
            keeps: Whether the arguments are the results if the function fails; else zeros are.
        """

        def forward(*values: Any) -> Any:
            return self.constant(step, compute, shapes, values, keeps=keeps)

        run = jax.custom_vjp(forward)

        def pull(kept: Sequence[Any], gradients: Any) -> tuple[Any, ...]:
            places = [place for place, value in enumerate(kept) if is_differentiable(value)]

            def differentiate(*given: Any) -> list[Any]:
                _, pull = jax.vjp(lambda *v: tuple(compute(*v)), *given[: len(kept)])
                found = pull(tuple(given[len(kept) :]))
                return [found[place] for place in places]

            wanted = [shape_of(kept[place]) for place in places]
            results = self.constant(step, differentiate, wanted, (*kept, *gradients))
            found = dict(zip(places, results, strict=True))
            return tuple(found.get(place) for place in range(len(kept)))

        run.defvjp(lambda *values: (forward(*values), values), pull)
        with busy():
            found: Sequence[Any] = run(*values)
        return found

    def constant(
        self,
        step: Step,
        compute: Compute,
        shapes: Sequence[Any],
        values: Sequence[Any],
        *,
        keeps: bool = False,
    ) -> Sequence[Any]:
        """Call a function on the host, which is not differentiated. Arguments are as in `call`."""
        with busy():
            keys = [jax.random.key_impl(v) if is_key(v) else None for v in values]
            impls = [_impl_of(shape) if is_key(shape) else None for shape in shapes]
            wanted = [
                jax.eval_shape(jax.random.key_data, shape) if is_key(shape) else shape
                for shape in shapes
            ]

            def call(*numbers: Any) -> Sequence[Any]:
                found = self._run(
                    lambda: _as_numbers(step, compute(*_as_keys(numbers, keys)), wanted)
                )
                if found is not None:
                    return found  # type: ignore[no-any-return]
                return numbers if keeps else [np.zeros(w.shape, w.dtype) for w in wanted]

            self.is_used = True
            given = [jax.random.key_data(v) if is_key(v) else v for v in values]
            results = call_host(call, wanted, given)
            return [
                value if impl is None else jax.random.wrap_key_data(value, impl=impl)
                for value, impl in zip(results, impls, strict=True)
            ]

    def _send(
        self,
        send: Callable[..., None],
        call: Callable[..., None],
        values: Sequence[Any],
        positions: Sequence[int],
    ) -> None:
        selected = [values[position] for position in positions]
        keys = [jax.random.key_impl(v) if is_key(v) else None for v in selected]
        self.is_used = True
        with busy():
            given = [jax.random.key_data(v) if is_key(v) else v for v in selected]
            send(lambda *numbers: call(*_as_keys(numbers, keys)), *map(stopped, given))

    def _run(self, function: Callable[[], Any]) -> Any:
        """Run a routine; return None if it fails or if no routine runs now."""
        if not self.session.enabled:
            return None
        try:
            with plain():
                return function()
        except BaseException as error:
            self.session.defer(error)
            return None


def stopped(value: Any) -> Any:
    """Return a value without its derivative."""
    with busy():
        return lax.stop_gradient(value)


def replaced(step: Step, values: Sequence[Any]) -> list[Any]:
    """Return the outputs that a replacement computes."""
    return several(step.replace(values))


def _positions(step: Step, values: Sequence[Any]) -> list[int]:
    """Return the positions that a routine gets and that have values."""
    wanted = step.action.positions
    if wanted is not None and any(position >= len(values) for position in wanted):
        step(values)  # Raises the error that names the position.
    return [p for p in (range(len(values)) if wanted is None else wanted) if values[p] is not None]


def _spread(positions: Sequence[int], selected: Sequence[Any], count: int) -> list[Any]:
    found: list[Any] = [None] * count
    for position, value in zip(positions, selected, strict=True):
        found[position] = value
    return found


def _as_keys(numbers: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
    """Return the values that a routine gets for those that a callback got."""
    return [
        jnp.asarray(value) if key is None else jax.random.wrap_key_data(value, impl=key)
        for value, key in zip(numbers, keys, strict=True)
    ]


def _impl_of(shape: Any) -> Any:
    """Return the generator of keys of a shape and dtype."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), shape)
    return found[0]


def _as_numbers(step: Step, found: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """Return a routine's results in the dtypes that the program has there."""
    if len(found) != len(wanted):
        raise RoutineResultError(
            f"A routine returned {len(found)} values, but the program has {len(wanted)} there",
            where=step.where,
            fix="Return as many values as the op does",
        )
    results = []
    for value, shape in zip(found, wanted, strict=True):
        result = np.asarray(jax.random.key_data(value) if is_key(value) else value, shape.dtype)
        if result.shape != shape.shape:
            raise RoutineResultError(
                f"A routine returned a value of shape {result.shape}, but the compiled program has "
                f"{shape.shape} there",
                where=step.where,
                fix="Return the same shape, or mark the routine with amanda.staged",
            )
        results.append(result)
    return results
