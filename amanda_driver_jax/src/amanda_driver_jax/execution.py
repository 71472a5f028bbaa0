"""One execution of an operator: analysis, edits before it, the operator, edits after it.

Owns the order of these, and which calls are operators. `gradients` has their backward programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import jit_p

from amanda_core.driver_kit import (
    ForwardProgram,
    OpContext,
    OpRecord,
    Session,
    Step,
    backward_plans,
    several,
)
from amanda_driver_jax import arrays, jax_internals as internals
from amanda_driver_jax.arrays import known, note_computed, note_copy, note_part, note_reshape
from amanda_driver_jax.contractions import part, permutation
from amanda_driver_jax.gradients import Compute, replaceable, watched
from amanda_driver_jax.identity.call_sites import call_marked, is_library_source
from amanda_driver_jax.interception import plain_bind
from amanda_driver_jax.routines import Host, HostCall, Hosted
from amanda_driver_jax.trace_keys import PLAIN
from amanda_driver_jax.vocabulary import DECLARATIONS

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


def _note_transposed(context: OpContext, new: Any, old: Any) -> None:
    if (axes := permutation(context)) is not None:
        note_copy(new, old, axes)


def _note_part(context: OpContext, new: Any, old: Any) -> None:
    if (indices := part(context)) is not None:
        note_part(new, old, indices)


#: Common type -> notes of what an output shows a part or a copy.
_NOTES: Mapping[str | None, Callable[[OpContext, Any, Any], None]] = {
    **dict.fromkeys(("cast", "identity"), lambda _, new, old: note_copy(new, old)),
    **dict.fromkeys(("slice", "squeeze"), _note_part),
    "transpose": _note_transposed,
    "reshape": lambda _, new, old: note_reshape(new, old),
}


class Execution(Hosted, ForwardProgram):
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
        self._given: Sequence[Any] = ()

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run the operator under its plans on its inputs, and return its outputs."""
        self._given = values
        if self._top:  # No operator in here is instrumented: faster to say once.
            with PLAIN:
                return super().run(values)
        self.staging = internals.is_compiled() or not all(map(arrays.is_concrete, values))
        return call_marked(super().run, values)

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the outputs of the operator, or of its replacement."""
        given, self._given = self._given, ()  # Nothing is kept alive.
        compute = self._computation(context, replacement, values)
        if self._top:  # `run` is inside of PLAIN.
            outputs = list(compute(*values))
        else:
            with PLAIN:
                outputs = list(compute(*map(internals.with_own_array, values)))
        if (note := _NOTES.get(context["type"])) is not None and values:
            note(context, outputs[0], values[0])
        elif len(outputs) == 1:
            note_computed(outputs[0], given)  # Edits do not change what it is made of.
        return outputs

    def _computation(
        self, context: OpContext, replacement: Step | None, values: Sequence[Any]
    ) -> Compute:
        compute: Compute = self._vanilla
        if replacement is not None:
            # Once, and always: JAX finds the tree of a custom_jvp's results by it.
            shapes = list(jax.eval_shape(self._vanilla, *values))
            compute = self._replacement(replacement, shapes)
        if self._top:  # Nothing is differentiated.
            return compute
        plans = backward_plans(context)
        if not (self.session.wants_backward or any(plans)):
            return compute
        if not any(map(arrays.is_differentiable, values)):
            return compute
        if any(plan.replacement is not None for plan in plans):
            return replaceable(self.host, compute, context)
        with PLAIN:
            if compute == self._bound and self.raw.name == "custom_jvp_call":
                compute = internals.callable_again(compute, self.params, values)
            results = jax.eval_shape(compute, *values)
        if not any(map(arrays.is_differentiable, results)):
            return compute
        return watched(self.host, compute, context)

    def _bound(self, *values: Any) -> tuple[Any, ...]:
        if self._top:  # `run` is inside of PLAIN.
            found = plain_bind(self.raw, *values, **self.params)
        else:
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
