"""Executions of operators: analysis, edits before the operator, this itself, edits after it.

Owns the order of these, and which calls are operators. `gradients` has their backward programs.
"""

from __future__ import annotations

import functools
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
from amanda_core.interface import IPoint
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


@functools.lru_cache(1024)
def _library_function(source: str | None) -> str | None:
    """Return the name in ``function at file:line`` of a function of JAX; None for others."""
    return source.split(" ", 1)[0] if source and is_library_source(source) else None


def op_type_of(primitive: Any, params: dict[str, Any]) -> str | None:
    """Return the type of an operator; None for what is none and holds the user's operators."""
    if primitive is jit_p:
        source = internals.function_source(params)
        return str(params["name"]) if is_library_source(source) else None
    if primitive.name == "custom_jvp_call":
        return _library_function(internals.source_of(params["subfuns"][0]))
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


def _note(
    context: OpContext, outputs: Sequence[Any], new: Sequence[Any], given: Sequence[Any]
) -> None:
    """Note what outputs are made of.

    Args:
        context: The operator.
        outputs: Its outputs, before edits.
        new: What it got.
        given: The same before edits, which do not change what outputs are made of.
    """
    if (note := _NOTES.get(context["type"])) is not None and new:
        note(context, outputs[0], new[0])
    elif len(outputs) == 1:
        note_computed(outputs[0], given)


def execute(
    session: Session,
    host: Host,
    primitive: Any,
    params: dict[str, Any],
    op: OpRecord,
    values: Sequence[Any],
    vanilla: Compute | None = None,
) -> list[Any]:
    """Run an operator outside of all transformations under its plans, and return its outputs.

    There contexts show the values themselves, and nothing is differentiated. So this does as
    `ForwardProgram.run` with fewer calls. Call it inside of `PLAIN`.

    Args:
        session: The session.
        host: Executes routines.
        primitive: The operator.
        params: Its parameters.
        op: Its record.
        values: Its inputs.
        vanilla: Computes it as JAX does; None to bind the primitive.
    """
    epoch, given = session.epoch, list(values)
    context = session.open(op.site, primitive, given, params, constant=known)
    try:
        before = context.trigger_callback(IPoint.BEFORE_FORWARD)
        new = host.fold(before, given, False) if before.steps else given
        if (replacement := before.replacement) is not None:
            # JAX finds the tree of a custom_jvp's results by it.
            jax.eval_shape(vanilla or functools.partial(plain_bind, primitive, **params), *new)
            outputs = several(replacement.replace(new))
        elif vanilla is not None:
            outputs = list(vanilla(*new))
        else:
            found = plain_bind(primitive, *new, **params)
            outputs = list(found) if primitive.multiple_results else [found]
        _note(context, outputs, new, values)
        context.execution.update(open=True, outputs=outputs)
        after = context.trigger_callback(IPoint.AFTER_FORWARD)
        if after.steps:
            outputs = host.fold(after, outputs, False)
        elif not (before or any(backward_plans(context))):
            op.note(session, epoch, acts=False)
    finally:
        context.release()
    return outputs


class Execution(Hosted, ForwardProgram):
    """One execution of an operator inside of a transformation.

    Args:
        session: The session.
        host: Executes routines.
        primitive: The operator.
        params: Its parameters.
        op: Its record.
        vanilla: Computes it as JAX does; None to bind the primitive.
    """

    def __init__(
        self,
        session: Session,
        host: Host,
        primitive: Any,
        params: dict[str, Any],
        op: OpRecord,
        vanilla: Compute | None = None,
    ) -> None:
        super().__init__(session, op, primitive, attrs=params, constant=known)
        self.host, self.params = host, params
        #: None for `_bound`, which would hold the execution: only the collector would free it.
        self._vanilla = vanilla
        self._given: Sequence[Any] = ()

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run the operator under its plans on its inputs, and return its outputs."""
        self._given = values
        self.staging = internals.is_compiled() or not all(map(arrays.is_concrete, values))
        return call_marked(super().run, values)

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the outputs of the operator, or of its replacement."""
        given, self._given = self._given, ()  # Nothing is kept alive.
        compute = self._computation(context, replacement, values)
        with PLAIN:
            outputs = list(compute(*map(internals.with_own_array, values)))
        _note(context, outputs, values, given)
        return outputs

    def _computation(
        self, context: OpContext, replacement: Step | None, values: Sequence[Any]
    ) -> Compute:
        compute: Compute = self._vanilla or self._bound
        if replacement is not None:
            # Once, and always: JAX finds the tree of a custom_jvp's results by it.
            shapes = list(jax.eval_shape(compute, *values))
            compute = self._replacement(replacement, shapes)
        plans = backward_plans(context)
        if not (self.session.wants_backward or any(plans)):
            return compute
        if not any(map(arrays.is_differentiable, values)):
            return compute
        if any(plan.replacement is not None for plan in plans):
            return replaceable(self.host, compute, context)
        with PLAIN:
            if self._vanilla is None and replacement is None and self.raw.name == "custom_jvp_call":
                compute = internals.callable_again(compute, self.params, values)
            results = jax.eval_shape(compute, *values)
        if not any(map(arrays.is_differentiable, results)):
            return compute
        return watched(self.host, compute, context)

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
