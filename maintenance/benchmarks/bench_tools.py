"""Tools that are measured, and each of Amanda's interceptors as a way to run a program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

import amanda

from .bench_timing import Way

__all__ = [
    "INTERCEPTORS",
    "KINDS",
    "Count",
    "EveryOp",
    "Nothing",
    "Prune",
    "applied",
    "unavailable",
    "ways",
]

#: Names of the PyTorch driver's interceptors, and the environment variable that selects one. It is
#: read each time tools are applied.
INTERCEPTORS = ["native", "function_mode"]
VARIABLE = "AMANDA_TORCH_INTERCEPTOR"


class Nothing(amanda.Tool):
    """Has all four analysis routines, none of which inserts anything."""

    def __init__(self) -> None:
        super().__init__()
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self.look, backward, require_outputs)

    def look(self, context: amanda.OpContext) -> None:
        """Do nothing."""


class Count(amanda.Tool):
    """Counts the operators of one type, forward and, if requested, backward.

    Args:
        counted: Type of the operators.
        backward: Also count them by the gradient that arrives at their output.
        inputs: Also count them by the gradients of all their inputs.
    """

    def __init__(self, counted: str, backward: bool = False, inputs: bool = False) -> None:
        super().__init__()
        self.counted, self.backward, self.inputs = counted, backward, inputs
        self.forward_runs = self.backward_runs = 0
        self.add_inst_for_op(self.select)

    def select(self, context: amanda.OpContext) -> None:
        """Insert counters into operators of this type."""
        if context.get_op().__name__ == self.counted:
            context.insert_before_op(self.count)
            if self.backward:
                context.insert_before_backward_op(self.count_backward)
            if self.inputs:
                context.insert_after_backward_op(self.count_backward)

    def count(self, *values: object) -> None:
        """Count one forward execution."""
        self.forward_runs += 1

    def count_backward(self, *values: object) -> None:
        """Count one backward execution."""
        self.backward_runs += 1


class EveryOp(amanda.Tool):
    """Calls an empty routine before every operator, forward and backward."""

    def __init__(self, backward: bool = True) -> None:
        super().__init__()
        self.add_inst_for_op(self.select)
        if backward:
            self.add_inst_for_op(self.select_backward, backward=True)

    def select(self, context: amanda.OpContext) -> None:
        """Instrument a forward operator."""
        context.insert_before_op(self.empty)

    def select_backward(self, context: amanda.OpContext) -> None:
        """Instrument a backward operator."""
        context.insert_before_backward_op(self.empty)

    def empty(self, *values: object) -> None:
        """Do nothing."""


class Prune(amanda.Tool):
    """Prunes half of each weight statically by magnitude; the masks are computed in the
    analysis.
    """

    def __init__(self, counted: str) -> None:
        super().__init__()
        self.counted = counted
        self.add_inst_for_op(self.select)

    def select(self, context: amanda.OpContext) -> None:
        """Compute the mask of a weight."""
        if context.get_op().__name__ == self.counted:
            mask = self.mask(context.get_inputs()[1])
            context.insert_before_op(self.prune, inputs=[1], mask=mask)

    @staticmethod
    def mask(weight: torch.Tensor) -> torch.Tensor:
        """Return 1 for the larger half of the weights and 0 for the others, in the weight's
        dtype.
        """
        magnitudes = weight.detach().abs()
        return (magnitudes > magnitudes.median()).to(weight.dtype)

    def prune(self, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the masked weight."""
        return weight * mask


#: Factories of the tools with which every program is measured, given the counted type.
KINDS: dict[str, Callable[[str], amanda.Tool]] = {
    "nothing inserted": lambda counted: Nothing(),
    "counted forward": lambda counted: Count(counted),
    "counted forward and backward": lambda counted: Count(counted, backward=True),
    "counted with the gradients of inputs": lambda counted: Count(counted, inputs=True),
    "every op, empty routine": lambda counted: EveryOp(),
}


def applied(interceptor: str, *tools: amanda.Tool) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context manager factory that applies the tools with one interceptor."""

    @contextmanager
    def extent() -> Iterator[object]:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = interceptor
        try:
            with amanda.apply(*tools) as handle:
                yield handle
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before

    return extent


def unavailable() -> dict[str, str]:
    """Return the interceptors that are not available in this installation, and why."""
    missing = {}
    for name in INTERCEPTORS:
        try:
            with applied(name, amanda.Tool())():
                pass
        except amanda.AmandaError as error:
            missing[name] = str(error).splitlines()[0]
    return missing


def ways(interceptor: str, run: Callable[[], object], counted: str) -> list[Way]:
    """Return a way to run the program for each kind of tool."""
    # One tool for each, applied again and again, so that it analyses only once.
    return [
        Way(f"amanda {interceptor}: {kind}", run, applied(interceptor, make(counted)))
        for kind, make in KINDS.items()
    ]
