"""Backward programs of operators whose gradients tools watch.

The computation of such an operator is one `jax.custom_vjp`, whose backward program is one raw
backward operator inside the aligned view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from amanda_core.driver_kit import BackwardProgram, OpContext, Step, several
from amanda_core.interface import UnsupportedError
from amanda_driver_jax import arrays, jax_internals as internals
from amanda_driver_jax.arrays import shown
from amanda_driver_jax.identity.call_sites import call_marked
from amanda_driver_jax.routines import Host, HostCall, Hosted
from amanda_driver_jax.trace_keys import LOCAL, PLAIN, evaluated

#: Computes the outputs of an operator, or gradients of its inputs.
Compute = Callable[..., tuple[Any, ...]]


def watched(host: Host, compute: Compute, context: OpContext) -> Compute:
    """Return an operator's computation with a backward program that executes plans."""
    function: Any = jax.custom_vjp(compute)

    def forward(*values: Any) -> tuple[Any, Any]:
        outputs, pull = jax.vjp(compute, *values)
        return outputs, (pull, values)

    def backward(kept: Any, gradients: Any) -> tuple[Any, ...]:
        return _Backward(host, context, *kept).run(gradients)

    function.defvjp(forward, backward)
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
        pull: Returns the gradients of the inputs, as `jax.vjp` does.
        values: The inputs.
    """

    def __init__(
        self, host: Host, forward: OpContext, pull: Compute, values: Sequence[Any]
    ) -> None:
        super().__init__(host.session, forward, f"{forward.op_type}_vjp", pull)
        self.host, self.pull, self.values = host, pull, values

    def run(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of the inputs."""
        if not self.is_active or LOCAL.hold is None:
            return tuple(self.pull(tuple(gradients)))
        self.staging = internals.is_compiled() or not all(map(arrays.is_concrete, gradients))
        with PLAIN:
            return call_marked(self._run, gradients)

    def _run(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        arriving = self.enter(arrays.without_float0(gradients))
        if self.replacement is not None:
            return tuple(self.leave(self._replaced(self.replacement, arriving)))
        # JAX has float0 where tools see None.
        pairs = zip(arriving, gradients, strict=True)
        found = self.pull(tuple(old if new is None else new for new, old in pairs))
        return tuple(self.leave(arrays.without_float0(found)))

    def _replaced(self, step: Step, gradients: list[Any]) -> list[Any]:
        """Run a routine instead of the backward operator; return the gradients of the inputs."""
        shapes = arrays.shapes_of(self.values, arrays.is_differentiable)

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
            None if gradient is None or shape is None else arrays.cast_like(gradient, value)
            for gradient, shape, value in zip(found, shapes, self.values, strict=False)
        ]
