"""One execution of an operator: analysis, edits before it, the operator, edits after it.

Owns the backward program of an operator whose gradients tools watch: one `jax.custom_vjp`, whose
backward program is one raw backward operator inside the aligned view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import jit_p

from amanda_core import IPoint, OpContext, Plan, Session, Step
from amanda_core.errors import UnsupportedError
from amanda_core.execution import (
    BackwardProgram,
    ForwardProgram,
    OpRecord,
    backward_plans,
    several,
)
from amanda_driver_jax import _jax_internals as internals
from amanda_driver_jax import _values
from amanda_driver_jax._call_sites import is_library_source, marked
from amanda_driver_jax._interception import plain_bind
from amanda_driver_jax._routines import Host, HostCall, evaluated, known, note_copy, shown
from amanda_driver_jax._trace_keys import LOCAL, PLAIN
from amanda_driver_jax.vocabulary import DECLARATIONS

Compute = Callable[..., tuple[Any, ...]]

_HOLDERS = frozenset(DECLARATIONS.names["holding"])


def op_type_of(primitive: Any, params: dict[str, Any]) -> str | None:
    """Return the type of an operator; None for what is none and holds the user's operators."""
    if primitive is jit_p:
        source = internals.function_source(params)
        return str(params["name"]) if is_library_source(source) else None
    if primitive.name == "custom_jvp_call":
        name, source = internals.wrapped_function(params)
        return name if is_library_source(source) else None
    return None if primitive.name in _HOLDERS else str(primitive.name)


class _Hosted:
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
        return shown(values, self.staging)

    def analysed(self, context: OpContext, point: IPoint) -> Plan:
        """Return the plan of an op at a point, after its analysis if it is new."""
        return evaluated(context.trigger_callback, point)  # type: ignore[no-any-return]


class Execution(_Hosted, ForwardProgram):
    """One execution of an operator.

    Args:
        session: The session.
        host: Executes routines.
        primitive: The operator.
        params: Its parameters.
        op: Its record.
        top: Whether it is outside of all transformations.
        vanilla: Computes it as JAX does; None to bind the primitive.
    """

    def __init__(
        self,
        session: Session,
        host: Host,
        primitive: Any,
        params: dict[str, Any],
        op: OpRecord,
        top: bool,
        vanilla: Compute | None = None,
    ) -> None:
        super().__init__(session, op, primitive, attrs=params, constant=known)
        self.host, self.params, self._top = host, params, top
        self._vanilla = vanilla or self._bound

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run the operator under its plans on its inputs, and return its outputs."""
        if self._top:  # No operator in here is instrumented: faster to say once.
            with PLAIN:
                return super().run(values)
        self.staging = internals.is_compiled() or not all(map(_values.is_concrete, values))
        with marked():
            return super().run(values)

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the outputs of the operator, or of its replacement."""
        compute = self._computation(context, replacement, values)
        with PLAIN:
            outputs = list(compute(*values))
        if context["type"] in ("cast", "identity") and values:
            note_copy(outputs[0], values[0])
        return outputs

    def _computation(
        self, context: OpContext, replacement: Step | None, values: Sequence[Any]
    ) -> Compute:
        compute: Compute = self._vanilla
        if replacement is not None:
            # Once, and always: JAX finds the tree of a custom_jvp's results by it.
            shapes = list(jax.eval_shape(self._vanilla, *values))
            compute = self._replacement(replacement, shapes)
        # At the top nothing is differentiated.
        if self._top or not (self.session.wants_backward or any(backward_plans(context))):
            return compute
        if not any(map(_values.is_differentiable, values)):
            return compute
        if internals.is_forward_mode():
            if any(plan.edits for plan in backward_plans(context)):
                _refuse_forward_mode(context.where)
            return compute
        return _watched(self.host, compute, context)

    def _bound(self, *values: Any) -> tuple[Any, ...]:
        with PLAIN:
            found = plain_bind(self.raw, *values, **self.params)
        return tuple(found) if self.raw.multiple_results else (found,)

    def _replacement(self, step: Step, shapes: Sequence[Any]) -> Compute:
        def run(values: Sequence[Any]) -> list[Any]:
            return several(step.replace(values))

        if not self.staging or step.action.staged:
            return lambda *values: tuple(run(values))
        host_call = HostCall(self.host, step, run, shapes)
        return lambda *values: tuple(host_call.differentiated(values))


def _watched(host: Host, compute: Compute, context: OpContext) -> Compute:
    """Return an operator's computation with a backward program that executes plans."""
    function: Any = jax.custom_vjp(compute)

    def forward(*values: Any) -> tuple[Any, Any]:
        outputs, pull = jax.vjp(compute, *values)
        return outputs, (pull, values)

    def backward(kept: Any, gradients: Any) -> tuple[Any, ...]:
        return _Backward(host, context, *kept).run(gradients)

    function.defvjp(forward, backward)
    return function  # type: ignore[no-any-return]


def _refuse_forward_mode(where: str = "amanda-driver-jax") -> None:
    raise UnsupportedError(
        "The gradients of this op are watched, but the program computes its derivative in forward "
        "mode (jax.jvp, jacfwd, linearize), which has no backward program",
        where=where,
        fix="Compute it with jax.vjp or jacrev, or do not apply the tool there",
    )


internals.refuse_forward_mode(__file__, _refuse_forward_mode)


class _Backward(_Hosted, BackwardProgram):
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
        self.staging = internals.is_compiled() or not all(map(_values.is_concrete, gradients))
        with PLAIN, marked():
            arriving = self.enter(_values.without_float0(gradients))
            if self.replacement is not None:
                return tuple(self.leave(self._replaced(self.replacement, arriving)))
            # JAX has float0 where tools see None.
            pairs = zip(arriving, gradients, strict=True)
            found = self.pull(tuple(old if new is None else new for new, old in pairs))
            return tuple(self.leave(_values.without_float0(found)))

    def _replaced(self, step: Step, gradients: list[Any]) -> list[Any]:
        """Run a routine instead of the backward operator; return the gradients of the inputs."""
        shapes = _values.shapes_of(self.values, _values.is_differentiable)

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
            None if gradient is None or shape is None else _values.cast_like(gradient, value)
            for gradient, shape, value in zip(found, shapes, self.values, strict=False)
        ]
