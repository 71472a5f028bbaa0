"""Tools that pass one gradient of an op to a routine, and a program to repeat under them."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import amanda

from .tensors import leaf

#: Enough for the plan of an op to be run in its cached form.
TIMES = 4


class Arriving(amanda.Tool):
    """Passes the gradients that arrive at an op's outputs to a routine, with the number of the
    call.
    """

    def __init__(self, op_type: str, routine: Callable[[int, torch.Tensor], Any]) -> None:
        super().__init__()
        self.calls = 0
        self._op_type, self._routine = op_type, routine
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == self._op_type:
            context.insert_before_backward_op(self.run, grad_outputs=[0])

    def run(self, grad: torch.Tensor) -> Any:
        self.calls += 1
        return self._routine(self.calls, grad)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return leaf(4, 3), leaf(5, 3)


class Given(Arriving):
    """The same with the gradient of the op's second input, requested with all others."""

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == self._op_type:
            context.insert_after_backward_op(self.second)

    def second(self, *grads: Any) -> Any:
        new = self.run(grads[1])
        return None if new is None else (grads[0], new, *grads[2:])


class Raw(Arriving):
    """The same with the gradient that arrives at one of the op's nodes."""

    def __init__(self, op_type: str, routine: Callable[[int, torch.Tensor], Any]) -> None:
        super().__init__(op_type, routine)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        pass

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ in ("AddmmBackward0", "MmBackward0"):
            context.insert_before_backward_op(self.run, grad_outputs=[0])


class RawResult(Raw):
    """The same with a result of that node, the gradient of the transposed weight."""

    def analyse_backward(self, context: amanda.OpContext) -> None:
        position = {"AddmmBackward0": 2, "MmBackward0": 1}.get(context.get_backward_op().__name__)
        if position is not None:
            context.insert_after_backward_op(self.run, grad_inputs=[position])
