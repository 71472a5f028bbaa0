"""The first execution of an operator under a tool with a mask: what it costs in calls.

Calls and not time are counted, so that a busy machine does not make a test fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS

#: Calls, of Python functions and of C functions, at the first execution of a `linear` whose weight
#: a routine multiplies by a mask: the routine, its analysis and the driver's plan among them.
CALLS = 240


class Masked(amanda.Tool):
    """Multiplies the weights of `linear` by a mask, as the program of the paper does."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(4, 4)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            context.insert_before_op(self.prune, inputs=[1], mask=self.mask)

    def prune(self, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight * mask


class Linear(nn.Linear):
    """A layer in which `watch` sees every call."""

    watch: Callable[[FrameType, str, Any], object] | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        sys.setprofile(self.watch)
        try:
            return nn.functional.linear(values, self.weight)
        finally:
            sys.setprofile(None)


def network(*, watch: Callable[[FrameType, str, Any], object]) -> nn.Module:
    # The code of a class is looked at once; it is not the operator's.
    layers = [Linear(4, 4, bias=False) for _ in range(6)]
    layers[-1].watch = watch
    return nn.Sequential(*layers)


@pytest.mark.one_interceptor
@pytest.mark.untraced
def test_a_first_execution_with_a_mask_takes_few_calls() -> None:
    if INTERCEPTORS.choice().name != "native":
        pytest.skip("the bound is that of the native interceptor")
    calls: list[str] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(getattr(argument, "__name__", repr(argument)))

    with torch.no_grad(), amanda.apply(Masked()):
        network(watch=watch)(torch.ones(2, 4))
    assert "prune" in calls
    assert len(calls) <= CALLS, calls
