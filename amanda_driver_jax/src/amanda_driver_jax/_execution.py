"""One execution of an operator: analysis, edits before it, the operator, edits after it.

Owns the backward program of an operator whose gradients tools watch: one `jax.custom_vjp`, whose
backward program is one raw backward operator inside the aligned view.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import jit_p

from amanda_core import IPoint, OpContext, Plan, Session, Step
from amanda_core.errors import UnsupportedError
from amanda_core.execution import BackwardProgram, backward_plans, several
from amanda_driver_jax import _jax_internals as internals
from amanda_driver_jax import _values
from amanda_driver_jax._call_sites import Op, is_library_source, is_traced, marked
from amanda_driver_jax._interception import plain_bind
from amanda_driver_jax._routines import Host, isolated, known, note_copy, shown
from amanda_driver_jax._trace_keys import LOCAL, busy, plain

Compute = Callable[..., tuple[Any, ...]]

#: Primitives that only hold other operators, which are seen where these are traced or run.
_HOLDING = """
    checkpoint closed_call cond core_call custom_vjp_call debug_callback io_callback
    pure_callback remat2 run_state scan shard_map stage while
"""
_HOLDERS = frozenset(_HOLDING.split())


def op_type_of(primitive: Any, params: dict[str, Any]) -> str | None:
    """Return the type of an operator; None for what is none and holds the user's operators."""
    if primitive is jit_p:
        source = internals.function_source(params)
        return str(params["name"]) if is_library_source(source) else None
    if primitive.name == "custom_jvp_call":
        name, source = internals.wrapped_function(params)
        return name if is_library_source(source) else None
    return None if primitive.name in _HOLDERS else str(primitive.name)


class Execution:
    """One execution of an operator.

    Attributes:
        has_plan: Whether a tool does something at it.
    """

    def __init__(
        self, session: Session, host: Host, primitive: Any, params: dict[str, Any], op: Op
    ) -> None:
        self.session, self.host, self.op = session, host, op
        self.primitive, self.params = primitive, params
        self.staging = self.has_plan = False

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run the operator under its plans and return its outputs."""
        self.staging = is_traced() or not all(map(_values.is_concrete, values))
        LOCAL.trace = internals.current_trace()
        context = self.session.open(
            self.op.site,
            self.primitive,
            inputs=shown(values, self.staging),
            attrs=self.params,
            constant=known,
        )
        try:
            with isolated():
                before = context.trigger_callback(IPoint.BEFORE_FORWARD)
            with marked():
                new = self.host.fold(before, values, self.staging)
                compute = self._computation(context, before.replacement, new)
                with plain():
                    outputs = list(compute(*new))
            context.fill(outputs=shown(outputs, self.staging))
            if context["type"] in ("cast", "identity") and values:
                note_copy(outputs[0], values[0])
            with isolated():
                after = context.trigger_callback(IPoint.AFTER_FORWARD)
            self.has_plan = bool(before) or bool(after)
            with marked():
                return self.host.fold(after, outputs, self.staging)
        finally:
            LOCAL.trace = None
            context.release()

    def _computation(
        self, context: OpContext, replacement: Step | None, values: Sequence[Any]
    ) -> Compute:
        compute: Compute = self._vanilla
        if replacement is not None:
            # Once, and always: JAX finds the tree of a custom_jvp's results by it.
            shapes = list(jax.eval_shape(self._vanilla, *values))
            compute = self._replacement(replacement, shapes)
        if not (self.session.wants_backward or any(backward_plans(context))):
            return compute
        if not any(map(_values.is_differentiable, values)):
            return compute
        if internals.is_forward_mode():
            _refuse_forward_mode(context)
            return compute
        return _watched(self.host, compute, context)

    def _vanilla(self, *values: Any) -> tuple[Any, ...]:
        with plain():
            found = plain_bind(self.primitive, *values, **self.params)
        return tuple(found) if self.primitive.multiple_results else (found,)

    def _replacement(self, step: Step, shapes: Sequence[Any]) -> Compute:
        def run(values: Sequence[Any]) -> list[Any]:
            return several(step.replace(values))

        if not self.staging or step.action.staged:
            return lambda *values: tuple(run(values))
        return lambda *values: tuple(self.host.call(step, run, shapes, values))


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


def _refuse_forward_mode(context: OpContext) -> None:
    """Refuse to differentiate an operator forward if tools edit its gradients."""
    if any(plan.edits for plan in backward_plans(context)):
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


internals.register_forward_mode(__file__, _pulling)


class _Backward(BackwardProgram):
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
        self.host, self.pull, self.values, self.staging = host, pull, values, False

    def run(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of the inputs."""
        if LOCAL.pulling:
            _refuse_forward_mode(self.forward)
            return tuple(self.pull(tuple(gradients)))
        if not self.is_active or LOCAL.hold is None:
            return tuple(self.pull(tuple(gradients)))
        self.staging = is_traced() or not all(map(_values.is_concrete, gradients))
        with busy(), marked():
            arriving = self.enter(_values.without_float0(gradients))
            if self.replacement is not None:
                return tuple(self.leave(self._replaced(self.replacement, arriving)))
            # JAX has float0 where tools see None.
            pairs = zip(arriving, gradients, strict=True)
            found = self.pull(tuple(old if new is None else new for new, old in pairs))
            return tuple(self.leave(_values.without_float0(found)))

    def execute(self, plan: Plan, gradients: list[Any]) -> list[Any]:
        """Return gradients as the steps of a plan edit them."""
        return self.host.fold(plan, gradients, self.staging)

    def shown(self, gradients: list[Any]) -> list[Any]:
        """Return gradients as contexts show them."""
        return shown(gradients, self.staging)

    def isolated(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager for analysis routines."""
        return isolated()

    def _replaced(self, step: Step, gradients: list[Any]) -> list[Any]:
        """Run a routine instead of the backward operator."""
        values = [value if _values.is_differentiable(value) else None for value in self.values]

        def run(gradients: list[Any]) -> list[Any]:
            found = several(step.replace(gradients))
            found += [None] * (len(values) - len(found))
            pairs = zip(found, values, strict=True)
            return [None if old is None else new for new, old in pairs]

        if not self.staging:
            with isolated():
                found = run(shown(gradients, False))
        elif step.action.staged:
            found = run(gradients)
        else:
            found = self._replaced_on_host(step, run, gradients)
        pairs = zip(found, values, strict=True)
        return [None if new is None else _values.cast_like(new, old) for new, old in pairs]

    def _replaced_on_host(self, step: Step, run: Any, gradients: list[Any]) -> list[Any]:
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]
        wanted = {
            place: _values.shape_of(value)
            for place, value in enumerate(self.values)
            if _values.is_differentiable(value)
        }

        def compute(selected: Sequence[Any]) -> list[Any]:
            arriving = dict(zip(given, selected, strict=True))
            found = run([arriving.get(place) for place in range(len(gradients))])
            zeros = {place: jnp.zeros(shape.shape, shape.dtype) for place, shape in wanted.items()}
            return [zeros[p] if found[p] is None else found[p] for p in wanted]

        selected = [gradients[place] for place in given]
        results = self.host.constant(step, compute, list(wanted.values()), selected)
        found = dict(zip(wanted, results, strict=True))
        return [found.get(place) for place in range(len(self.values))]
