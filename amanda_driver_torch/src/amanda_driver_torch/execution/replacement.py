"""Replacements of an operator: what a routine computes in its place, in the form of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core.driver_kit import Step, standing_for
from amanda_core.interface import RoutineResultError
from amanda_driver_torch.gradients.edits import check_written, refused
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.operators.signature import outputs_of
from amanda_driver_torch.threads.modes import call_in_users_modes, call_with_gradients
from amanda_driver_torch.torch_internals.internals import version_of

__all__ = ["replaced"]


def replaced(call: OperatorCall, step: Step) -> Any:
    """Return a replacement's result, in the form and place of the op's own."""
    values, signature, operator = list(call.values), call.bound.signature, call.operator
    written = values[0] if signature.in_place and values else None
    if isinstance(written, torch.Tensor):
        # The routine's argument must stay intact when the result is written over the original.
        values[0] = given = written.clone()
        version = None if given.is_inference() else version_of(given)
        with standing_for(_original_of(call)):
            result = call_in_users_modes(step.replace, values)
        # The routine may have written its argument in place.
        if result is not given or version is None or version_of(given) != version:
            check_written(written, result, step, same_dtype=False)
            written.copy_(result)
        # `x[i] = v` returns nothing; every other in-place op returns its input.
        return None if operator.op_type == "__setitem__" else written
    out = call.bound.out
    empty = operator.counts == {0} or (out is not None and operator.empty_with_out)
    with standing_for(_original_of(call)):
        result = call_in_users_modes(step.replace, values, empty=empty)
    _check(operator.counts, operator.op_type, result, step)
    if result is None:  # It has written its arguments itself.
        return None
    if out is not None:
        _write_out(out, result, step)
        return None if operator.empty_with_out else out
    kind = getattr(torch.return_types, operator.op_type, None)
    if kind is not None and type(result) in (tuple, list) and len(result) == kind.n_fields:
        return kind(result)
    return result


def _original_of(call: OperatorCall) -> Callable[[Sequence[Any]], Any]:
    """Return the original as a function of its inputs, for a replacement, which may keep it and
    must not keep this execution's inputs by it.
    """
    arguments, run = call.bound.arguments(), call.call

    def original(values: Sequence[Any]) -> Any:
        args, kwargs = arguments(values)
        return run(*args, **kwargs)

    return original


def _check(counts: set[int], op_type: str, result: Any, step: Step) -> None:
    results = outputs_of(result)
    if counts and len(results) not in counts:
        raise RoutineResultError(
            f"A replacement returned {len(results)} values, but {op_type} has "
            f"{' or '.join(map(str, sorted(counts)))}",
            where=step.where,
            fix="Return what the op would have returned",
        )
    # One of several outputs may be missing, such as attention weights that nobody needs.
    others = [value for value in results if not isinstance(value, torch.Tensor)]
    wrong = others if len(others) == len(results) else [v for v in others if v is not None]
    if counts and wrong:
        what = f"{wrong[0]!r} cannot replace the result of {op_type}"
        raise refused(step, what, "Return tensors")


def _write_out(out: Any, result: Any, step: Step) -> None:
    destinations, results = outputs_of(out), outputs_of(result)
    if len(destinations) != len(results):
        raise refused(
            step,
            f"A replacement returned {len(results)} values for {len(destinations)} "
            "destinations (out=)",
            "Return one value for each destination",
        )
    for destination, value in zip(destinations, results, strict=True):
        check_written(destination, value, step, same_dtype=False)
        call_with_gradients(False, destination.copy_, value)
