"""One execution of an operator inside transforms of `torch.func`, such as `vmap` and `grad`.

Owns what routines get there. Values are wrapped, one level for each transform. A staged routine
computes with them, so that its edits become a part of the function. Any other routine gets the
tensors in the wrappers, and only looks. There are no backward operators.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from amanda_core.driver_kit import TRANSFORMED, OpContext, Plan, Step
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.execution.execute import Run
from amanda_driver_torch.execution.replacement import replaced
from amanda_driver_torch.gradients.edits import edited
from amanda_driver_torch.operators.signature import restructure
from amanda_driver_torch.threads.modes import call_routine
from amanda_driver_torch.threads.state import AFTER_FORWARD, BEFORE_FORWARD
from amanda_driver_torch.torch_internals.internals import (
    call_outside_transforms,
    physical,
    transforms,
)

__all__ = ["TransformedRun"]


class TransformedRun(Run):
    """The instrumented execution of one call inside transforms."""

    def _open(self) -> OpContext:
        site, bound = self.record.site, self.bound
        namespace = f"{site.namespace.rpartition('/')[0]}/{TRANSFORMED}"
        site = dataclasses.replace(site, namespace=namespace, same_as="eager")
        context = self.context = self.session.open(
            site,
            self.operator.raw,
            inputs=bound.values,
            attrs=bound.attrs,
            input_names=bound.signature.names,
            constant=self.execution.constant,
        )
        context["transforms"], self.new = transforms(), False
        context.execution["writes"] = self.mutated
        return context

    def _run(self, context: OpContext) -> Any:
        try:
            before = self._analyse(BEFORE_FORWARD)
            values = self._execute(before, self.values, self.mutated)
            intact, self.values = values is self.values, values
            if before.replacement is not None:
                _refuse_host(before.replacement)
                self.execution.edits += 1
                returned = replaced(self, before.replacement)
            elif intact:
                args, kwargs = self.bound.given
                returned = self.call(*args, **kwargs)
            else:
                returned = self.call_original(values)
            self.original.keep(returned)
            outputs = context.execution["outputs"] = self.outputs_of(returned)
            after = self._analyse(AFTER_FORWARD)
            in_place = self.bound.signature.mutated or self.bound.out is not None
            results = self._execute(after, outputs, range(len(outputs)) if in_place else ())
            if returned is None or results is outputs:
                return returned
            return restructure(returned, results)
        finally:
            context.release()  # Its values must not leave their transforms.

    def _execute(self, plan: Plan, values: list[Any], written: Any) -> list[Any]:
        """Run the steps of a plan, and return the values with their edits.

        Args:
            plan: The plan.
            values: The values.
            written: Positions of values that the operator writes.
        """
        found = values
        for step in plan.steps:
            if not step.action.staged:
                shown = [_shown(value) for value in found]
                if call_outside_transforms(call_routine, step, shown):
                    _refuse_host(step)
                continue
            for position, new in call_routine(step, found, step.action.autodiff):
                if position in written:
                    raise UnsupportedError(
                        "A value that an operator writes cannot be edited inside transforms",
                        where=step.where,
                        fix="Edit the inputs or results of operators that return a new tensor",
                    )
                found = list(found) if found is values else found
                found[position] = edited(found[position], new, step, node=True)
                self.execution.edits += 1
        return found


def _shown(value: Any) -> Any:
    """Return a value without the wrappers of transforms; tensors may be in lists."""
    if isinstance(value, (list, tuple)):
        return [_shown(one) for one in value]
    return physical(value) if isinstance(value, torch.Tensor) else value


def _refuse_host(step: Step) -> None:
    if not step.action.staged:
        raise UnsupportedError(
            "An operator inside transforms of torch.func can be edited only by staged routines",
            where=step.where,
            fix="Mark the routine with amanda.staged",
        )
