"""Routines: executed on concrete values, inlined into a traced program, or called by it.

Owns the callbacks of traced programs and their derivatives. An exception would end the program or
get lost in it, so it is deferred, and the values stay as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from amanda_core.driver_kit import OpContext, Plan, Run, Session, Step, deferring
from amanda_core.interface import IPoint, RoutineResultError, UnsupportedError
from amanda_driver_jax import arrays, jax_internals as internals
from amanda_driver_jax.arrays import shown
from amanda_driver_jax.identity.call_sites import is_transposed
from amanda_driver_jax.trace_keys import LOCAL, PLAIN, evaluated
from amanda_driver_jax.value_primitives import edited


class Host:
    """Executes routines, and owns the callbacks of the programs of one store.

    Attributes:
        session: The running session of the store, or the last one.
        is_used: Whether any program has a callback.
    """

    session: Session
    is_used = False

    def fold(self, plan: Plan, values: Sequence[Any], staging: bool) -> list[Any]:
        """Execute the steps of a plan in order, each on the values that the earlier ones returned.

        Args:
            plan: The plan.
            values: The values; None for one that does not exist.
            staging: Whether a program is traced, so that there are no concrete values.
        """
        new = list(values)
        for step in plan.steps:
            action = step.action
            if not staging and not action.autodiff:
                changes = step(new) if LOCAL.trace is None else evaluated(step, shown(new, False))
                if changes:
                    changes = [(n, arrays.straight_through(new[n], value)) for n, value in changes]
            elif not action.staged and staging:
                changes = [] if _left_out(step) else self._on_host(step, new)
            else:
                changes = step(new) if action.autodiff else _inlined(step, new)
            for position, value in changes:
                with PLAIN:
                    new[position] = arrays.cast_like(value, new[position])
        return new

    def _on_host(self, step: Step, values: Sequence[Any]) -> Sequence[tuple[int, Any]]:
        """Let the program call a routine; return the positions and values that it edits."""
        action = step.action
        if action.observe and _is_of_several_processes():
            self._leave_out(step)
            return []
        _need_own_values(step)
        given = _selected(step, values)
        is_empty = all(value is None for value in given)
        several = len(_present(given)) > 1
        tangents = [n for n, value in enumerate(given) if internals.is_tangent(value)]
        if action.positions == () or (action.observe and not is_empty and not tangents):
            self._observe(Plan((step,)), given, not action.tool.by_example)
        elif several and not action.autodiff and is_transposed(sys._getframe(1)):
            # There, edited values would depend on each other, and those of tangents are none.
            self._observe(_looking(step), given)
        elif not is_empty:
            called = HostCall(self, step, Plan((step,)), arrays.shapes_of(given), keeps=True)
            if not action.autodiff:
                # What others depend on must not depend on tangents.
                passed = tangents if action.observe else range(len(given))
                return _inlined(
                    lambda given: [e for e in _present(called.constant(given)) if e[0] in passed],
                    given,
                )
            return _present(called.differentiated(given))
        return []

    def _leave_out(self, step: Step) -> None:
        """Say that an observer on the host does not look at a program of several processes."""
        tool, what = step.action.tool, f"in a program of {jax.process_count()} processes"
        self.session.note_call(step.op_name, f"{what} under jax.jit", tools=[tool])
        self.session.warn_once(
            f"{tool.tool_name} does not look at operators {what} under jax.jit, which would have "
            f"to send its values to one of them. To see them, {_CURE}"
        )

    def _observe(self, run: Run, values: Sequence[Any], together: bool = False) -> None:
        """Let the program call a function that only reads values."""
        shapes = arrays.shapes_of(values)

        def call(axes: Sequence[tuple[int, ...]] | None, *numbers: Any) -> None:
            found = arrays.from_numbers(numbers, shapes)
            with arrays.mapped([value for value in found if value is not None], axes or ()):
                self.guarded(run, found)

        self.is_used = True
        with PLAIN:
            internals.look_on_host(call, arrays.as_numbers(values), together)

    def guarded(self, run: Run, values: list[Any]) -> Sequence[Any] | None:
        """Run a routine; return None if it fails or if no routine runs now."""
        if not self.session.enabled:
            return None
        with PLAIN:
            return deferring(self.session, run)(values)


_CURE = "let jax.shard_map divide it, where each process has values of its own"


def _need_own_values(step: Step) -> None:
    """Refuse an edit on the host of values that several processes hold together.

    XLA would send them to one of the processes, and call the routine there only.
    """
    if _is_of_several_processes():
        raise UnsupportedError(
            f"A routine on the host cannot run in a program of {jax.process_count()} processes, "
            "which would have to send its values to one of them",
            where=step.where,
            fix=f"Mark the routine with amanda.staged; or {_CURE}",
        )


def _is_of_several_processes() -> bool:
    """Return True while a program is traced whose values several processes hold together."""
    if jax.process_count() == 1:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.axis_names or {*mesh.manual_axes} != {*mesh.axis_names}


def _left_out(step: Step) -> bool:
    """Return True if an exported program is without a step.

    Raises:
        UnsupportedError: It edits, which the program cannot do without the host.
    """
    if LOCAL.exports and not step.action.observe:
        raise UnsupportedError(
            "A routine on the host cannot be exported",
            where=step.where,
            fix="Mark the routine with amanda.staged",
        )
    return LOCAL.exports


def _looking(step: Step) -> Run:
    """Return the routine of a step where it may look at values, but not edit them."""

    def look(values: list[Any]) -> list[Any]:
        if step(values):
            raise UnsupportedError(
                "A routine has edited values in a function that JAX transposes, such as the rule "
                "of a jax.custom_jvp",
                where=step.where,
                fix="Mark the routine with amanda.staged, or let it edit one value",
            )
        return values

    return look


class Hosted:
    """How plans are executed.

    Attributes:
        host: Executes routines.
        staging: Whether a program is traced, so that there are no concrete values.
    """

    host: Host
    staging = False

    def execute(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Return values as the steps of a plan edit them."""
        return self.host.fold(plan, values, self.staging)

    def shown(self, values: list[Any]) -> list[Any]:
        """Return values as contexts show them."""
        return values if LOCAL.trace is None else shown(values, self.staging)

    def analysed(self, context: OpContext, point: IPoint) -> Plan:
        """Return the plan of an op at a point, after its analysis if it is new."""
        if LOCAL.trace is None:  # As in `evaluated`, with one call less.
            return context.trigger_callback(point)
        return evaluated(context.trigger_callback, point)  # type: ignore[no-any-return]


@dataclass(eq=False)  # JAX hashes its methods.
class HostCall:
    """A function that a program calls on the host.

    Attributes:
        host: The host.
        step: The step that it executes.
        run: The function.
        shapes: Those of its results; None for one that does not exist.
        keeps: Whether the arguments are the results if the function fails; else zeros are.
    """

    host: Host
    step: Step
    run: Run
    shapes: Sequence[Any]
    keeps: bool = False

    def differentiated(self, values: Sequence[Any]) -> Sequence[Any]:
        """Call it; it is differentiated on the host as well.

        Args:
            values: Its arguments; None for one that does not exist.
        """

        def pull(kept: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
            def differentiate(given: list[Any]) -> Sequence[Any]:
                _, pulled = jax.vjp(self.run, given[: len(kept)])
                (found,) = pulled(given[len(kept) :])
                return found  # type: ignore[no-any-return]

            wanted = arrays.shapes_of(kept, arrays.is_differentiable)
            pulling = HostCall(self.host, self.step, differentiate, wanted)
            return (pulling.constant([*kept, *gradients]),)

        function: Any = jax.custom_vjp(self.constant)
        function.defvjp(lambda values: (self.constant(values), values), pull)
        with PLAIN:
            return function(list(values))  # type: ignore[no-any-return]

    def constant(self, values: Sequence[Any]) -> list[Any]:
        """Call it, without a derivative. The arguments are as in `differentiated`."""
        _need_own_values(self.step)
        given = arrays.shapes_of(values)
        wanted = jax.eval_shape(arrays.as_numbers, self.shapes)

        def checked(values: list[Any]) -> list[Any]:
            return _checked(self.step, self.run(values), self.shapes, wanted)

        def call(*numbers: Any) -> Sequence[Any]:
            found = self.host.guarded(checked, arrays.from_numbers(numbers, given))
            if found is not None:
                return found
            return numbers if self.keeps else [np.zeros(w.shape, w.dtype) for w in wanted]

        self.host.is_used = True
        with PLAIN:
            results = internals.call_host(call, wanted, arrays.as_numbers(values))
            return arrays.from_numbers(results, self.shapes)  # type: ignore[no-any-return]


def _present(values: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(place, value) for place, value in enumerate(values) if value is not None]


def _inlined(
    run: Callable[[list[Any]], Sequence[tuple[int, Any]]], values: Sequence[Any]
) -> Sequence[tuple[int, Any]]:
    """Make an edit a part of the program; return the positions of the new values, and these.

    Args:
        run: Gets the values, and returns the positions and values that it edits.
        values: The values; None for one that does not exist.
    """
    present = _present(values)

    def program(*given: Any) -> list[tuple[int, Any]]:
        new = list(values)
        for (place, _), value in zip(present, given, strict=True):
            new[place] = value
        found = run(new)
        return [(places[place], arrays.cast_like(value, new[place])) for place, value in found]

    places = {place: number for number, (place, _) in enumerate(present)}
    with PLAIN:
        found = edited(program, [value for _, value in present])
    return [(present[number][0], value) for number, value in found]


def _selected(step: Step, values: Sequence[Any]) -> list[Any]:
    """Return the values that a routine gets, and None in the place of others."""
    wanted = step.action.positions
    if wanted is not None and any(position >= len(values) for position in wanted):
        step(values)  # Raises the error that names the position.
    return [v if wanted is None or n in wanted else None for n, v in enumerate(values)]


def _checked(
    step: Step, found: Sequence[Any], shapes: Sequence[Any], wanted: Sequence[Any]
) -> list[Any]:
    """Return a routine's results as the program has them: numbers in its dtypes, zeros for None."""
    if len(found) == len(shapes):
        pairs = zip(found, shapes, strict=True)
        found = [np.zeros(s.shape, s.dtype) if f is None else f for f, s in pairs if s is not None]
    results = [np.asarray(number) for number in arrays.as_numbers(found)]
    given, expected = [each.shape for each in results], [each.shape for each in wanted]
    if given != expected:
        raise RoutineResultError(
            f"A routine returned values of the shapes {given}, but the compiled program has "
            f"{expected} there",
            where=step.where,
            fix="Return the same shapes, or mark the routine with amanda.staged",
        )
    return [r.astype(shape.dtype) for r, shape in zip(results, wanted, strict=True)]
