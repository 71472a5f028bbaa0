"""Backward programs of operators whose gradients tools watch or edit.

Tangents of such an operator's inputs and outputs pass taps. Where JAX transposes these, their
cotangents enter and leave the backward program of the operator. An operator whose backward program
a tool replaces is one `jax.custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from amanda_core.driver_kit import BackwardProgram, OpContext, Step, backward_plans, several
from amanda_core.interface import UnsupportedError
from amanda_driver_jax import arrays, jax_internals as internals
from amanda_driver_jax.arrays import shown
from amanda_driver_jax.identity.call_sites import call_marked
from amanda_driver_jax.routines import Host, HostCall, Hosted
from amanda_driver_jax.trace_keys import LOCAL, PLAIN, evaluated
from amanda_driver_jax.value_primitives import tapped

R = TypeVar("R")

#: Computes the outputs of an operator, or gradients of its inputs.
Compute = Callable[..., tuple[Any, ...]]


def replaceable(host: Host, compute: Compute, context: OpContext) -> Compute:
    """Return an operator's computation with a backward program that a tool replaces."""
    function: Any = jax.custom_vjp(compute)

    def forward(*values: Any) -> tuple[Any, Any]:
        outputs, pull = jax.vjp(compute, *values)
        return outputs, (pull, values)

    def backward(kept: Any, gradients: Any) -> tuple[Any, ...]:
        pull, values = kept
        return _Backward(host, context, arrays.shapes_of(values)).run(gradients, pull)

    function.defvjp(forward, backward)
    return function  # type: ignore[no-any-return]


def watched(host: Host, compute: Compute, context: OpContext) -> Compute:
    """Return an operator's computation whose cotangents pass plans, where JAX computes any."""
    function: Any = jax.custom_jvp(compute)

    def differentiate(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        live = [n for n, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        program = _Taps(host, context, arrays.shapes_of(primals), live)

        def run(*varied: Any) -> tuple[Any, ...]:
            values = list(primals)
            for place, value in zip(live, varied, strict=True):
                values[place] = value
            return compute(*values)

        with PLAIN:
            arriving = tapped([tangents[place] for place in live], _Leaving(program))
            outputs, found = jax.jvp(run, [primals[place] for place in live], arriving)
            found = list(found)
            program.outputs = [n for n, t in enumerate(found) if t.dtype != float0]
            passed = tapped([found[place] for place in program.outputs], _Entering(program))
            program.count = len(found)
            for place, tangent in zip(program.outputs, passed, strict=True):
                found[place] = tangent
            return outputs, tuple(found)

    function.defjvp(differentiate, symbolic_zeros=True)
    return function  # type: ignore[no-any-return]


def refuse_forward_mode(where: str = "amanda-driver-jax") -> None:
    """Refuse to watch gradients in forward mode, which has no backward program."""
    raise UnsupportedError(
        "The gradients of this op are watched, but the program computes its derivative in forward "
        "mode (jax.jvp, jacfwd, linearize), which has no backward program",
        where=where,
        fix="Compute it with jax.vjp or jacrev, or do not apply the tool there",
    )


internals.refuse_forward_mode(__file__, refuse_forward_mode)


class _Backward(Hosted, BackwardProgram):
    """One execution of a backward program.

    Args:
        host: Executes routines, and knows the running session.
        forward: The context of the operator.
        shapes: Those of its inputs.
    """

    def __init__(self, host: Host, forward: OpContext, shapes: Sequence[Any]) -> None:
        super().__init__(host.session, forward, f"{forward.op_type}_vjp")
        self.host, self.shapes = host, shapes

    def run(self, gradients: Sequence[Any], pull: Compute) -> tuple[Any, ...]:
        """Return the gradients of the inputs; `pull` computes them as `jax.vjp` does."""
        if not self.is_running:
            return tuple(pull(tuple(gradients)))
        return self.marked(self._run, gradients, pull)

    @property
    def is_running(self) -> bool:
        """True if routines run in this thread now."""
        return self.is_active and LOCAL.hold is not None

    def marked(self, run: Callable[..., R], gradients: Sequence[Any], *others: Any) -> R:
        """Call `run` with gradients, as a part of an operator."""
        self.staging = internals.is_compiled() or not all(map(arrays.is_concrete, gradients))
        with PLAIN:
            return call_marked(run, gradients, *others)

    def _run(self, gradients: Sequence[Any], pull: Compute) -> tuple[Any, ...]:
        arriving = self.enter(arrays.without_float0(gradients))
        if self.replacement is not None:
            return tuple(self.leave(self.replaced(self.replacement, arriving)))
        # JAX has float0 where tools see None.
        pairs = zip(arriving, gradients, strict=True)
        found = pull(tuple(old if new is None else new for new, old in pairs))
        return tuple(self.leave(arrays.without_float0(found)))

    def replaced(self, step: Step, gradients: list[Any]) -> list[Any]:
        """Run a routine instead of the backward operator; return the gradients of the inputs."""
        shapes = [shape if arrays.is_differentiable(shape) else None for shape in self.shapes]

        def run(gradients: list[Any]) -> list[Any]:
            found = several(step.replace(gradients))
            return found + [None] * (len(shapes) - len(found))

        if not self.staging:
            found: Sequence[Any] = evaluated(run, shown(gradients, False))
        elif step.action.staged:
            found = run(gradients)
        else:
            found = HostCall(self.host, step, run, shapes).constant(gradients)
        return [
            None if gradient is None or shape is None else jnp.asarray(gradient, shape.dtype)
            for gradient, shape in zip(found, shapes, strict=False)
        ]


class _Taps:
    """The taps around one operator where JAX has differentiated it.

    Attributes:
        host: Executes routines.
        context: The context of the operator.
        shapes: The shapes of its inputs.
        inputs: The positions of those that have tangents.
        outputs: The positions of outputs that have.
        count: How many outputs there are.
        running: The backward program that has been entered.
        found: Gradients that a replacement has returned.
    """

    outputs: Sequence[int] = ()
    count = 0
    running: _Backward | None = None
    found: Sequence[Any] | None = None

    def __init__(
        self, host: Host, context: OpContext, shapes: Sequence[Any], inputs: Sequence[int]
    ) -> None:
        self.host, self.context, self.shapes, self.inputs = host, context, shapes, inputs

    def pushed(self) -> None:
        """Refuse forward mode if a tool edits gradients, of which there are none then."""
        if any(plan.edits for plan in backward_plans(self.context)):
            refuse_forward_mode(self.context.where)


class _Entering(NamedTuple):
    """The tap of the tangents of the outputs."""

    taps: _Taps

    def pulled(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        taps = self.taps
        backward = _Backward(taps.host, taps.context, taps.shapes)
        taps.running = taps.found = None
        if not backward.is_running:
            return cotangents
        taps.running = backward
        return backward.marked(self._enter, cotangents, backward)

    def _enter(self, cotangents: Sequence[Any], backward: _Backward) -> Sequence[Any]:
        taps = self.taps
        gradients: list[Any] = [None] * taps.count
        for place, gradient in zip(taps.outputs, cotangents, strict=True):
            gradients[place] = gradient
        arriving = backward.enter(gradients)
        if backward.replacement is not None:
            taps.found = backward.replaced(backward.replacement, arriving)
        return [arriving[place] for place in taps.outputs]

    def pushed(self) -> None:
        self.taps.pushed()


class _Leaving(NamedTuple):
    """The tap of the tangents of the inputs."""

    taps: _Taps

    def pulled(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        backward = self.taps.running
        if backward is None:
            return cotangents
        self.taps.running = None
        return backward.marked(self._leave, cotangents, backward)

    def _leave(self, cotangents: Sequence[Any], backward: _Backward) -> Sequence[Any]:
        taps = self.taps
        gradients: list[Any] = [None] * len(taps.shapes)
        for place, gradient in zip(taps.inputs, cotangents, strict=True):
            found = gradient if taps.found is None else taps.found[place]
            gradients[place] = jnp.zeros_like(gradient) if found is None else found
        taps.found = None
        leaving = backward.leave(gradients)
        return [leaving[place] for place in taps.inputs]

    def pushed(self) -> None:
        self.taps.pushed()
