"""A model with the staged edits of tools as a concrete function, which needs no Amanda.

Owns what of the plans is a part of it. The twin of the model's function is inlined into a new
function, and lives as long as this, since it owns the functions that both call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Plan
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.analysis import Analysis, OpPlans
from amanda_driver_tf.tensorflow_internals.modules import context, function_def_to_graph, ops
from amanda_driver_tf.threads import quietly

__all__ = ["ExportedPlans", "exported_function"]

#: Graph of an exported function -> the twin with the functions that it calls.
_TWINS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class ExportedPlans(Analysis):
    """The plans of a program that runs without Amanda: staged edits of forward ops alone.

    Args:
        analysis: The whole analysis.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._whole = analysis

    def is_backward(self, op: Any) -> bool:
        """Return True if an op belongs to the backward program."""
        return self._whole.is_backward(op)

    def plans_of(self, op: Any, analyse: bool = True) -> OpPlans | None:
        """Return the plans of an op without the steps that only look; None if not an operator.

        Args:
            op: The op.
            analyse: Whether to run due analysis routines, or to take the plans as they are.

        Raises:
            UnsupportedError: A step edits on the host.
        """
        plans = self._whole.plans_of(op, analyse)
        if plans is None:
            return None
        before, after = _staged(plans.before), _staged(plans.after)
        return plans.unaligned()._replace(before=before, after=after)


def _staged(plan: Plan) -> Plan:
    edits = [step for step in plan.steps if not step.action.observe]
    for step in (*edits, plan.replacement):
        if step is not None and not step.action.staged:
            raise UnsupportedError(
                "A routine on the host cannot be exported",
                where=step.where,
                fix="Mark the routine with amanda.staged",
            )
    return Plan(edits, plan.replacement)


def exported_function(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rewrite: Callable[[str, Sequence[Any]], Any],
) -> Any:
    """Return a model with the edits of the applied tools as a concrete function.

    Args:
        model: A model or a function.
        args: Example inputs.
        kwargs: Others that are given by name.
        rewrite: Returns the twin of a function for its inputs; None if nothing is edited.
    """

    def program(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    traced = tf.function(program, autograph=False).get_concrete_function(*args, **kwargs)
    given = [one for one in tf.nest.flatten((args, kwargs)) if tf.is_tensor(one)]
    captured = list(traced.captured_inputs)
    twin = rewrite(traced.name.decode(), [*given, *captured])
    if twin is None:
        return traced
    name = twin.name.decode()
    with quietly(), ops.init_scope():
        graph, tensors = function_def_to_graph.function_def_to_graph_def(
            context.context().get_function_def(name), include_library_functions=True
        )
    definition = context.context().get_function_def(name)
    inputs = [argument.name for argument in definition.signature.input_arg]
    outputs = [definition.ret[result.name] for result in definition.signature.output_arg]
    form = traced.structured_outputs

    def inlined(*args: Any, **kwargs: Any) -> Any:
        """Compute the model with the edits."""
        found = [one for one in tf.nest.flatten((args, kwargs)) if tf.is_tensor(one)]
        here = ops.get_default_graph()
        for variable in traced.variables:
            here.watch_variable(variable)
        found += [here.capture(one) for one in captured]
        results = tf.graph_util.import_graph_def(
            graph,
            input_map=dict(zip(inputs, found, strict=True)),
            return_elements=[tensors[output] for output in outputs],
            name="",
        )
        tensors_left = iter(results)
        left = [
            None if one is None else next(tensors_left)
            for one in tf.nest.flatten(form, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(form, left, expand_composites=True)

    with quietly():
        found = tf.function(inlined, autograph=False).get_concrete_function(*args, **kwargs)
    _TWINS[found.graph] = twin
    return found
