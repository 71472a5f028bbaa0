"""One execution of an operator: analysis, edits before it, the operator, edits after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from amanda_core import IPoint, OpContext, Session, Step
from amanda_driver_jax._backward import refuse_forward_mode, watched
from amanda_driver_jax._call_sites import Op, is_library_source, is_traced, marked
from amanda_driver_jax._folding import fold, isolated, known, note_copy, shown
from amanda_driver_jax._host import Host, replaced
from amanda_driver_jax._interception import plain_bind
from amanda_driver_jax._jax_internals import (
    current_trace,
    function_source,
    is_forward_mode,
    jit_p,
    wrapped_function,
)
from amanda_driver_jax._trace_keys import LOCAL, plain
from amanda_driver_jax._values import is_concrete, is_differentiable

__all__ = ["Execution", "op_type_of"]

#: Primitives that only hold other operators, which are seen where these are traced or run.
_HOLDERS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "cond",
        "core_call",
        "custom_vjp_call",
        "debug_callback",
        "io_callback",
        "pure_callback",
        "remat2",
        "run_state",
        "scan",
        "shard_map",
        "stage",
        "while",
    }
)


def op_type_of(primitive: Any, params: dict[str, Any]) -> str | None:
    """Return the type of an operator; None for what is none and holds the user's operators."""
    if primitive is jit_p:
        return str(params["name"]) if is_library_source(function_source(params)) else None
    if primitive.name == "custom_jvp_call":
        name, source = wrapped_function(params)
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
        session = self.session
        self.staging = is_traced() or not all(map(is_concrete, values))
        LOCAL.trace = current_trace()
        context = session.open(
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
                new = fold(self.host, before, values, self.staging)
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
                return fold(self.host, after, outputs, self.staging)
        finally:
            LOCAL.trace = None
            context.release()

    def _computation(
        self, context: OpContext, replacement: Step | None, values: Sequence[Any]
    ) -> Callable[..., Any]:
        compute = self._vanilla
        if replacement is not None:
            # Once, and always: JAX finds the tree of a custom_jvp's results by it.
            shapes = list(jax.eval_shape(self._vanilla, *values))
            compute = self._replacement(replacement, shapes)
        plans = [context.plan(IPoint.BEFORE_BACKWARD), context.plan(IPoint.AFTER_BACKWARD)]
        if not (self.session.wants_backward or any(plans)):
            return compute
        if not any(map(is_differentiable, values)):
            return compute
        if is_forward_mode():
            refuse_forward_mode(context)
            return compute
        return watched(self.host, compute, context)

    def _vanilla(self, *values: Any) -> tuple[Any, ...]:
        with plain():
            found = plain_bind(self.primitive, *values, **self.params)
        return tuple(found) if self.primitive.multiple_results else (found,)

    def _replacement(self, step: Step, shapes: Sequence[Any]) -> Callable[..., Any]:
        host = self.host
        if not self.staging or step.action.staged:
            return lambda *values: tuple(replaced(step, values))

        return lambda *values: tuple(
            host.call(step, lambda *given: replaced(step, given), shapes, values)
        )
