"""The backward program of an operator that tools watch.

An operator whose gradients are watched is one `jax.custom_vjp`. Its backward program is one raw
backward operator, inside the aligned view.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from amanda_core import IPoint, OpContext, Plan, Site, Step
from amanda_core.errors import UnsupportedError
from amanda_driver_jax._call_sites import is_traced, marked
from amanda_driver_jax._folding import fold, isolated, shown
from amanda_driver_jax._host import Host, replaced
from amanda_driver_jax._jax_internals import register_forward_mode
from amanda_driver_jax._trace_keys import LOCAL, busy
from amanda_driver_jax._values import (
    cast_like,
    is_concrete,
    is_differentiable,
    shape_of,
    without_float0,
)

__all__ = ["refuse_forward_mode", "watched"]

Compute = Callable[..., Any]


def watched(host: Host, compute: Compute, context: OpContext) -> Compute:
    """Return an operator's computation with a backward program that executes plans.

    Args:
        host: Calls routines out of programs, and knows the running session.
        compute: Returns a tuple of outputs.
        context: That of the operator.
    """
    function: Any = jax.custom_vjp(compute)

    def forward(*values: Any) -> tuple[Any, Any]:
        outputs, pull = jax.vjp(compute, *values)
        return outputs, (pull, values)

    def backward(kept: Any, gradients: Any) -> tuple[Any, ...]:
        pull, values = kept
        return _Backward(host, context, pull, values).run(gradients)

    function.defvjp(forward, backward)
    found: Compute = function
    return found


def refuse_forward_mode(context: OpContext) -> None:
    """Refuse to differentiate an operator forward if tools edit its gradients."""
    plans = [context.plan(IPoint.BEFORE_BACKWARD), context.plan(IPoint.AFTER_BACKWARD)]
    if any(plan.edits for plan in plans):
        raise UnsupportedError(
            "The gradients of this op are edited, but the program computes its derivative "
            "in forward mode (jax.jvp, jacfwd), which has no backward program",
            where=context.where,
            fix="Compute it with jax.vjp or jacrev, or do not apply the tool there",
        )


@contextlib.contextmanager
def _pulling() -> Iterator[None]:
    before, LOCAL.pulling = LOCAL.pulling, True
    try:
        yield
    finally:
        LOCAL.pulling = before


register_forward_mode(__file__, _pulling)


class _Backward:
    """One execution of a backward program."""

    def __init__(
        self, host: Host, context: OpContext, vanilla: Compute, values: Sequence[Any]
    ) -> None:
        self.host, self.session, self.forward = host, host.session, context
        self.vanilla, self.values, self.staging = vanilla, values, False

    def run(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of the inputs."""
        session = self.session
        if LOCAL.pulling:
            refuse_forward_mode(self.forward)
            return tuple(self.vanilla(tuple(gradients)))
        if session.closed:
            session.warn_once("backward runs after `apply` has ended, so routines do not run")
        if LOCAL.hold is None or not session.enabled:
            return tuple(self.vanilla(tuple(gradients)))
        self.staging = is_traced() or not all(is_concrete(g) for g in gradients)
        aligned = self.forward.plan(IPoint.BEFORE_BACKWARD)
        with busy(), marked():
            found = self.fold(aligned, without_float0(gradients))
            if aligned.replacement is not None:
                found = self.replace(aligned.replacement, found)
            else:
                found = self.raw(found, gradients)
            found = self.fold(self.forward.plan(IPoint.AFTER_BACKWARD), found)
        return tuple(found)

    def fold(self, plan: Plan, gradients: list[Any]) -> list[Any]:
        return fold(self.host, plan, gradients, self.staging) if plan else gradients

    def raw(self, found: list[Any], gradients: Sequence[Any]) -> list[Any]:
        """Run the backward operator itself, with a context of its own."""
        forward = self.forward
        name = f"{forward.op_type}_vjp"
        site = Site(name, name, forward.namespace, f"{forward.name}/{name}", forward.module_path)
        context = self.session.open(site, self.vanilla, forward=forward, backward=True)
        try:
            context.fill(grad_outputs=shown(found, self.staging))
            with isolated():
                before = context.trigger_callback(IPoint.BEFORE_BACKWARD)
            found = self.fold(before, found)
            if before.replacement is not None:
                result = self.replace(before.replacement, found)
            else:
                # JAX has float0 where tools see None.
                pairs = zip(found, gradients, strict=True)
                arriving = tuple(old if new is None else new for new, old in pairs)
                result = without_float0(self.vanilla(arriving))
            context.fill(grad_inputs=shown(result, self.staging))
            with isolated():
                after = context.trigger_callback(IPoint.AFTER_BACKWARD)
            return self.fold(after, result)
        finally:
            context.release()

    def replace(self, step: Step, gradients: list[Any]) -> list[Any]:
        """Run a routine instead of the backward operator."""
        if not self.staging:
            with isolated():
                found = replaced(step, shown(gradients, False))
        elif step.action.staged:
            found = replaced(step, gradients)
        else:
            found = self._replaced_on_host(step, gradients)
        found += [None] * (len(self.values) - len(found))
        return [
            None if new is None or not is_differentiable(value) else cast_like(new, value)
            for new, value in zip(found, self.values, strict=True)
        ]

    def _replaced_on_host(self, step: Step, gradients: list[Any]) -> list[Any]:
        shapes = [shape_of(value) if is_differentiable(value) else None for value in self.values]
        places = [place for place, shape in enumerate(shapes) if shape is not None]
        wanted = [shape for shape in shapes if shape is not None]
        zeros = [np.zeros(shape.shape, shape.dtype) for shape in wanted]
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]

        def compute(*selected: Any) -> list[Any]:
            arriving: list[Any] = [None] * len(gradients)
            for place, gradient in zip(given, selected, strict=True):
                arriving[place] = gradient
            found = replaced(step, arriving)
            found += [None] * (len(shapes) - len(found))
            pairs = zip((found[place] for place in places), zeros, strict=True)
            return [zero if new is None else new for new, zero in pairs]

        selected = [gradients[place] for place in given]
        results = self.host.constant(step, compute, wanted, selected)
        found: list[Any] = [None] * len(shapes)
        for place, result in zip(places, results, strict=True):
            found[place] = result
        return found
