"""Marks of operators that run at once: recorded without Python, in the order of the program."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import Any

import torch

import amanda
from amanda_core.driver_kit import Marks
from amanda_driver_torch import plugin

from .repeated_executions import TIMES, data, product


class Marking(amanda.Tool):
    """Marks the begin and the end of each operator, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.marks = Marks(self.full)
        self.fulls = 0
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def full(self) -> None:
        self.fulls += 1
        list(self.marks.take())

    def _number(self, name: str) -> int:
        self.names += [f"begin {name}", f"end {name}"]
        return len(self.names) - 2

    def analyse(self, context: amanda.OpContext) -> None:
        n, note = self._number(context.op_type), self.marks.note
        context.insert_before_op(note, observe=True, inputs=[], number=n)
        context.insert_after_op(note, observe=True, outputs=[], number=n + 1)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        n, note = self._number(context.get_backward_op().name()), self.marks.note
        context.insert_before_backward_op(note, observe=True, grad_outputs=[], number=n)
        context.insert_after_backward_op(note, observe=True, grad_inputs=[], number=n + 1)

    def take(self) -> list[tuple[str, int, int]]:
        return [(self.names[number], at, thread) for number, at, thread in self.marks.take()]


def step(x: torch.Tensor, w: torch.Tensor) -> None:
    product(x, w).sum().backward()


def test_marks_come_in_the_order_of_the_program_and_without_python() -> None:
    (x, w), tool, calls = data(), Marking(), list[str]()
    x.requires_grad_(False)

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is Marks.note.__code__:
            calls.append("note")

    taken = []
    with amanda.apply(tool):
        for number in range(TIMES + 1):
            if number == TIMES:
                sys.setprofile(profile)
            begin = time.perf_counter_ns()
            step(x, w)
            sys.setprofile(None)
            taken.append(tool.take())
            times = [begin, *(at for _, at, _ in taken[-1]), time.perf_counter_ns()]
            assert times == sorted(times)
    names = ["linear", "sum", "SumBackward0", "MmBackward0", "TBackward0", "AccumulateGrad"]
    found = [name for name, _, _ in taken[-1]]
    assert found[:4] == ["begin linear", "end linear", "begin sum", "end sum"]
    assert found == [f"{place} {name}" for name in names for place in ("begin", "end")]
    assert all(
        [(name, thread) for name, _, thread in one]
        == [(name, threading.get_ident()) for name in found]
        for one in taken
    )
    assert bool(calls) is not (plugin.amanda_driver_status().interceptor == "native")


def test_many_marks_are_taken_before_they_are_too_many() -> None:
    (x, w), tool = data(), Marking()
    with amanda.apply(tool), torch.no_grad():
        for _ in range(4):
            product(x, w)
        tool.take()
        for _ in range(Marks.limit // 2 + 1):
            product(x, w)
    assert tool.fulls == 1
    assert len(tool.take()) == 2


def test_a_tool_with_marks_is_not_kept_alive() -> None:
    (x, w), tool = data(), Marking()
    with amanda.apply(tool):
        for _ in range(TIMES):
            step(x, w)
    reference = weakref.ref(tool)
    del tool
    gc.collect()
    assert reference() is None
