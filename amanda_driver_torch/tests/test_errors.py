"""The errors of failing routines and wrong requests, and that programs run afterwards."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.errors import (
    ActionError,
    EditError,
    LateActionError,
    PositionError,
    RoutineResultError,
)
from amanda_core.testing.kit.tools import after, at_inputs, at_outputs, before, replacing, tool
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS

from .tensors import equal, grad_of, leaf

X = torch.randn(2, 3)


class Mine(ValueError):
    pass


def failing(*values: Any) -> Any:
    raise Mine("my own")


class Failing(amanda.Tool):
    """A tool with a name, whose routine fails at one point of relu."""

    def __init__(self, point: str) -> None:
        self.point = point
        raw = point.startswith("raw ")
        self.add_inst_for_op(self.analyse, backward=raw)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type in ("relu", "ReluBackward0"):
            getattr(context, self.point.removeprefix("raw "))(failing)


POINTS = [
    "insert_before_op",
    "insert_after_op",
    "replace_op",
    "insert_before_backward_op",
    "insert_after_backward_op",
    "replace_backward_op",
    "raw insert_before_backward_op",
    "raw insert_after_backward_op",
    "raw replace_backward_op",
]


@pytest.mark.parametrize("point", POINTS)
def test_note_names_tool_routine_op_id_module_and_line(point: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    ids: list[int] = []
    spy = tool(lambda c: ids.append(c.get_op_id()), "relu")
    with pytest.raises(Mine, match="my own") as caught, amanda.apply(spy, Failing(point)):
        model(X).sum().backward()  # line of the call
    (note,) = caught.value.__notes__
    assert point.removeprefix("raw ") in note
    assert "tool Failing" in note
    assert "routine failing" in note
    assert "'1/relu" in note
    assert "module '1'" in note
    if not point.startswith("raw "):
        assert f"id {ids[0]}" in note
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.endswith("# line of the call"))
    assert f"at {Path(__file__).name}:{line}" in note


@pytest.mark.parametrize("backward", [False, True])
def test_note_on_a_failing_analysis(backward: bool) -> None:
    def analyse(context: amanda.OpContext) -> None:
        raise Mine("my own")

    with pytest.raises(Mine) as caught, amanda.apply(tool(analyse, backward=backward)):
        leaf(3).exp().sum().backward()
    (note,) = caught.value.__notes__
    assert note.startswith("In analysis by tool Tool(")
    assert ("backward" in note) == backward


def test_errors_of_amanda_are_no_notes_but_say_the_same() -> None:
    with (
        pytest.raises(RoutineResultError) as caught,
        amanda.apply(before("relu", lambda v: (v, v), [0])),
    ):
        torch.relu(X)
    for part in ("2 values", "given 1", "insert_before_op by tool", "'relu'", "[routine-result]"):
        assert part in str(caught.value)


# Operators of Python, whose C code swallows a TypeError.

I = torch.tensor([1, 2])  # noqa: E741
BINARY: dict[str, tuple[str, Callable[[], Any]]] = {
    "x + 1": ("add", lambda: X + 1),
    "1 + x": ("add", lambda: 1 + X),
    "x - x": ("sub", lambda: X - X),
    "1 - x": ("rsub", lambda: 1 - X),
    "x * x": ("mul", lambda: X * X),
    "x / 2": ("div", lambda: X / 2),
    "1 / x": ("reciprocal", lambda: 1 / X),
    "x ** 2": ("pow", lambda: X**2),
    "2 ** x": ("pow", lambda: 2**X),
    "x // 2": ("floor_divide", lambda: X // 2),
    "2 // x": ("floor_divide", lambda: 2 // X),
    "x % 2": ("remainder", lambda: X % 2),
    "5 % x": ("remainder", lambda: 5 % X),
    "x @ x.T": ("matmul", lambda: X @ X.T),
    "x < 1": ("lt", lambda: X < 1),
    "x == 1": ("eq", lambda: X == 1),
    "x != x": ("ne", lambda: X != X),
    "i & 1": ("bitwise_and", lambda: I & 1),
    "1 | i": ("bitwise_or", lambda: 1 | I),
    "i ^ 1": ("bitwise_xor", lambda: I ^ 1),
    "1 << i": ("bitwise_left_shift", lambda: 1 << I),
    "x += 1": ("add_", lambda: operator.iadd(X.clone(), 1)),
    "x *= 1": ("mul_", lambda: operator.imul(X.clone(), 1)),
    "x /= 1": ("div_", lambda: operator.itruediv(X.clone(), 1)),
    "x %= 1": ("remainder_", lambda: operator.imod(X.clone(), 1)),
    "i <<= 1": ("bitwise_left_shift_", lambda: operator.ilshift(I.clone(), 1)),
}


class Calling(nn.Module):
    def __init__(self, program: Callable[[], Any]) -> None:
        super().__init__()
        self.program = program

    def forward(self) -> Any:
        return self.program()


def type_error(*values: Any) -> Any:
    raise TypeError("my own type error")


@pytest.mark.parametrize("insert", [before, after])
@pytest.mark.parametrize("what", BINARY)
def test_type_error_of_a_routine_at_an_operator_is_not_lost(what: str, insert: Any) -> None:
    op_type, program = BINARY[what]
    plain = program()
    for run in (program, Calling(program)):
        with (
            pytest.raises(TypeError, match="my own type error") as caught,
            amanda.apply(insert(op_type, type_error)),
        ):
            run()
        assert any("type_error" in note for note in caught.value.__notes__)
    equal(program(), plain)


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("insert", ["insert_before_op", "insert_after_op"])
@pytest.mark.parametrize("what", BINARY)
def test_type_error_of_a_later_execution_is_not_lost(what: str, insert: str, edits: bool) -> None:
    op_type, program = BINARY[what]
    calls: list[int] = []

    def third(*values: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise TypeError("my own type error")

    def copies(*values: Any) -> Any:
        return tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)

    def analyse(context: amanda.OpContext) -> None:
        for routine in (copies, third) if edits else (third,):
            getattr(context, insert)(routine)

    def repeated() -> None:
        for _ in range(4):
            program()

    with (
        pytest.raises(TypeError, match="my own type error") as caught,
        amanda.apply(tool(analyse, op_type)),
    ):
        repeated()
    assert any("third" in note for note in caught.value.__notes__)
    if INTERCEPTORS.choice().name == "native":
        assert len(calls) == 3  # Python may go on with the reflected operator in function mode.


def test_type_error_swallowed_inside_a_module_comes_out_of_the_module() -> None:
    def program() -> Any:
        try:
            return X + 1
        except TypeError:
            return None

    with amanda.apply(before("add", type_error)):
        if INTERCEPTORS.choice().name == "native":
            # There the exception reaches the program itself, which may catch it.
            assert Calling(program)() is None
        else:
            with pytest.raises(TypeError, match="my own"):
                Calling(program)()
        Calling(lambda: X * 1)()


def test_type_error_is_raised_once() -> None:
    with amanda.apply(before("add", type_error)):
        with pytest.raises(TypeError, match="my own"):
            Calling(lambda: X + 1)()
        X.exp()
    equal(X + 0, X)


def test_type_error_of_the_program_itself_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"), amanda.apply(before("add", print)):
        X + object()  # type: ignore[operator]


# Wrong requests.


def ask(method: str, positions: str | None = None, **flags: bool) -> amanda.Tool:
    """Return a tool that requests `method` at relu, for position 7 if `positions` names them."""
    keywords = {positions: [7]} if positions else {}

    def analyse(context: amanda.OpContext) -> None:
        getattr(context, method)(lambda *values: values[0], **keywords)

    return tool(analyse, "ReluBackward0" if flags.get("backward") else "relu", **flags)


WRONG: dict[str, tuple[amanda.Tool, type[Exception]]] = {
    "before-late": (ask("insert_before_op", require_outputs=True), LateActionError),
    "replace-late": (ask("replace_op", require_outputs=True), LateActionError),
    "forward-in-backward": (ask("insert_after_op", backward=True), LateActionError),
    "before-backward-late": (
        ask("insert_before_backward_op", backward=True, require_outputs=True),
        LateActionError,
    ),
    "no-input": (ask("insert_before_op", "inputs"), PositionError),
    "no-output": (ask("insert_after_op", "outputs"), PositionError),
    "no-output-late": (ask("insert_after_op", "outputs", require_outputs=True), PositionError),
    "no-grad-input": (ask("insert_after_backward_op", "grad_inputs"), PositionError),
    "no-grad-output": (ask("insert_before_backward_op", "grad_outputs"), PositionError),
    "no-raw-grad-output": (
        ask("insert_before_backward_op", "grad_outputs", backward=True),
        PositionError,
    ),
    "no-raw-grad-input": (
        ask("insert_after_backward_op", "grad_inputs", backward=True),
        PositionError,
    ),
    "negative": (before("relu", lambda v: v, [-1]), PositionError),
    "no-function": (tool(lambda c: c.insert_before_op(3), "relu"), ActionError),  # type: ignore[arg-type]
    "too-many-before": (before("relu", lambda v: (v, v), [0]), RoutineResultError),
    "too-many-after": (after("relu", lambda v: (v, v)), RoutineResultError),
    "too-many-outside": (at_outputs("relu", lambda g: (g, g)), RoutineResultError),
    "too-many-inside": (at_inputs("relu", lambda g: (g, g), [0]), RoutineResultError),
    "no-gradient": (at_outputs("relu", lambda g: 3), EditError),
    "nothing": (replacing("relu", lambda *values: None), RoutineResultError),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_request_is_an_error_and_everything_goes_on(what: str) -> None:
    wrong, kind = WRONG[what]
    x = leaf(3)
    with pytest.raises(kind, match=r"relu|Relu"), amanda.apply(wrong):
        torch.relu(x).sum().backward()
    x.grad = None
    torch.relu(x).sum().backward()
    equal(grad_of(x), (x > 0).float())


# Going on inside.


def test_failed_analysis_is_tried_again() -> None:
    tries: list[int] = []

    def analyse(context: amanda.OpContext) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise Mine
        context.insert_before_op(torch.zeros_like, inputs=[0])

    outputs = []
    with amanda.apply(tool(analyse, "exp")):
        for _ in range(3):
            try:
                outputs.append(torch.exp(X))
            except Mine:
                outputs.append(X)
    assert len(tries) == 2
    equal(outputs, [X, torch.ones(2, 3), torch.ones(2, 3)])


def test_session_goes_on_after_a_routine_failed() -> None:
    calls: list[int] = []

    def routine(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise Mine
        return value * 3

    x = leaf(3)
    with amanda.apply(at_inputs("exp", routine, [0])):
        loss = x.exp().sum()
        with pytest.raises(Mine):
            loss.backward(retain_graph=True)
        assert x.grad is None
        loss.backward()
    equal(grad_of(x), 3 * x.detach().exp())


def test_failure_inside_a_wrapper_of_torch_leaves_it_usable() -> None:
    with amanda.apply(before("relu", failing)):
        with pytest.raises(Mine):
            F.relu(X)
        equal(F.gelu(X), torch._C._nn.gelu(X))
        with pytest.raises(Mine):
            F.relu(X)
