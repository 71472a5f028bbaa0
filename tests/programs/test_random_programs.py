"""Random programs under random edits equal the same programs with the edits written by hand.

The reference applies each edit as an autograd function of its own around the operator, so nothing
in the comparison comes from the driver. Hypothesis creates the programs, the same in each run, and
reports the smallest that differs. `AMANDA_PROGRAMS=2000` runs more.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import amanda

PROGRAMS = int(os.environ.get("AMANDA_PROGRAMS", "60"))

Call = Callable[..., Any]


class Straight(torch.autograd.Function):
    """Replaces `old` by `new`; the gradient goes to `old`."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


class Edit(NamedTuple):
    """One edit: where (input, output, grad_input, grad_output), and by what factor."""

    where: str
    factor: float


class Line(NamedTuple):
    """One line of a program: its operator, two earlier values, and the edits of the operator."""

    kind: str
    left: int
    right: int
    edits: tuple[Edit, ...]


def _in_place(kind: Call) -> Callable[[Call, torch.Tensor, torch.Tensor], torch.Tensor]:
    def line(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        fresh = a * 1
        call(kind, fresh, b)
        return fresh

    return line


def _in_view(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    fresh = a * 1
    call(torch.Tensor.mul_, fresh[1], b[0])
    return fresh


def _island(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        constant: torch.Tensor = call(torch.sigmoid, b)
    return a * constant


def _loop(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        a = call(torch.tanh, a)
    return a


def _branch(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = call(torch.sigmoid, a) if float(a.detach().sum()) > 0 else b * 2
    return result


#: Kind of line -> (the program's code, the op's type, which edits a reference can be written for).
KINDS: dict[str, tuple[Any, str, str]] = {
    "tanh": (lambda call, a, b: call(torch.tanh, a), "tanh", "all"),
    "mul": (lambda call, a, b: call(torch.mul, a, b), "mul", "all"),
    "cat": (lambda call, a, b: call(torch.cat, [a[:2], b[2:]]), "cat", "output"),
    "linear": (lambda call, a, b: call(F.linear, a, b), "linear", "all"),
    "stack": (lambda call, a, b: call(torch.stack, [a, b]).sum(0), "stack", "output"),
    "layer_norm": (lambda call, a, b: call(F.layer_norm, a, (4,), b[0]), "layer_norm", "all"),
    "add_": (_in_place(torch.Tensor.add_), "add_", "gradients"),
    "mul_": (_in_place(torch.Tensor.mul_), "mul_", "gradients"),
    "view": (_in_view, "mul_", "gradients"),
    "island": (_island, "sigmoid", "output"),
    "loop": (_loop, "tanh", "all"),
    "branch": (_branch, "sigmoid", "all"),
    "shared": (lambda call, a, b: call(F.linear, a, b) + call(F.linear, b, a), "linear", "all"),
    "mixed": (lambda call, a, b: call(torch.exp, a.float().tanh()).double(), "exp", "all"),
    "t": (lambda call, a, b: call(torch.t, a) * 1.5, "t", "gradients"),
}
WHERE = {
    "all": ("input", "output", "grad_input", "grad_output"),
    "output": ("output", "grad_output"),
    "gradients": ("grad_input", "grad_output"),
}


@st.composite
def programs(draw: Any) -> list[Line]:
    """Draw up to eight lines, each with up to two edits."""
    lines = []
    for number in range(draw(st.integers(2, 8))):
        kind = draw(st.sampled_from(list(KINDS)))
        edit = st.builds(
            Edit, st.sampled_from(WHERE[KINDS[kind][2]]), st.sampled_from([0.5, 2.0, -1.0])
        )
        left, right = draw(st.integers(0, number)), draw(st.integers(0, number))
        lines.append(Line(kind, left, right, tuple(draw(st.lists(edit, max_size=2)))))
    return lines


def run(lines: list[Line], x: torch.Tensor, w: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the loss of a program; `call(line, function, *arguments)` runs each line's
    operator.
    """
    values = [x]
    for number, line in enumerate(lines):
        code = KINDS[line.kind][0]
        values.append(
            code(
                lambda function, *arguments, n=number: call(n, function, *arguments),
                values[line.left],
                values[line.right] * w,
            )
        )
    return torch.stack([value.sum() * (n + 1) for n, value in enumerate(values)]).sum()


def by_hand(lines: list[Line]) -> Call:
    """Return a function that runs an operator with its edits written around it."""

    def scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
        result: torch.Tensor = ScaledGradient.apply(value, factor) if value.requires_grad else value
        return result

    def straight(value: torch.Tensor, factor: float) -> torch.Tensor:
        result: torch.Tensor = Straight.apply(value, value.detach() * factor)
        return result

    def call(number: int, function: Call, *arguments: Any) -> Any:
        edits = lines[number].edits
        first, *others = arguments
        written = KINDS[lines[number].kind][1].endswith("_")
        target, value = first, first
        for where, factor in edits:
            if where == "grad_input":
                value = scaled(value, factor)
        for where, factor in edits:
            if where == "input":
                value = straight(value, factor)
        result = function(value.clone() if written else value, *others)
        for where, factor in edits:
            if where == "grad_output":
                result = scaled(result, factor)
        for where, factor in edits:
            if where == "output":
                result = straight(result, factor)
        return target.copy_(result) if written else result

    return call


class Editing(amanda.Tool):
    """Makes the edits of a program; `running` is the line whose operator is being called."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.running: int | None = None
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if self.running is None or context.op_type != KINDS[self.lines[self.running].kind][1]:
            return
        for where, factor in self.lines[self.running].edits:
            if where == "input":
                context.insert_before_op(self.scale, [0], factor=factor)
            elif where == "output":
                context.insert_after_op(self.scale, [0], factor=factor)
            elif where == "grad_input":
                context.insert_after_backward_op(self.scale, [0], factor=factor)
            else:
                context.insert_before_backward_op(self.scale, [0], factor=factor)

    def scale(self, value: torch.Tensor, factor: float) -> torch.Tensor:
        return value * factor

    def call(self, number: int, function: Call, *arguments: Any) -> Any:
        self.running = number
        try:
            return function(*arguments)
        finally:
            self.running = None


class Program(torch.nn.Module):
    """A program as a module, so that equal lines are told apart by their occurrence."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__()
        self.lines = lines

    def forward(self, x: torch.Tensor, w: torch.Tensor, call: Call) -> torch.Tensor:
        return run(self.lines, x, w, call)


@settings(max_examples=max(PROGRAMS // 4, 1))
@given(programs(), st.integers(0, 1000))
def test_the_order_of_tools_that_edit_different_lines_does_not_matter(
    lines: list[Line], seed: int
) -> None:
    torch.manual_seed(seed)
    start = torch.randn(4, 4, dtype=torch.double), torch.rand(4, 4, dtype=torch.double)
    tools = [
        Editing([line if n % 2 == odd else line._replace(edits=()) for n, line in enumerate(lines)])
        for odd in (0, 1)
    ]

    def running(number: int, function: Call, *arguments: Any) -> Any:
        return tools[0].call(number, tools[1].call, number, function, *arguments)

    def outcome(call: Call, *applied: amanda.Tool) -> list[Any]:
        program = Program(lines)
        x, w = (value.clone().requires_grad_() for value in start)
        with amanda.apply(*applied):
            loss = program(x, w, call)
            loss.backward()
        return [loss.detach(), x.grad, w.grad]

    one, other = outcome(running, *tools), outcome(running, *tools[::-1])
    torch.testing.assert_close(one, other, rtol=0, atol=0, msg=str(lines))
    expected = outcome(by_hand(lines))
    torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-12, msg=str(lines))


@settings(max_examples=PROGRAMS)
@given(programs(), st.integers(0, 1000))
def test_edited_program_equals_its_hand_written_twin(lines: list[Line], seed: int) -> None:
    torch.manual_seed(seed)
    start = torch.randn(4, 4, dtype=torch.double), torch.rand(4, 4, dtype=torch.double)
    program, tool = Program(lines), Editing(lines)

    def outcome(call: Call) -> list[torch.Tensor | None]:
        x, w = (value.clone().requires_grad_() for value in start)
        loss = program(x, w, call)
        loss.backward()
        return [loss.detach(), x.grad, w.grad]

    expected = outcome(by_hand(lines))
    with amanda.apply(tool):
        results = [outcome(tool.call) for _ in range(3)]  # Analysed, and cached twice.
        with amanda.cache_disabled():
            results.append(outcome(tool.call))
    results.append(outcome(lambda number, function, *arguments: function(*arguments)))
    plain = outcome(lambda number, function, *arguments: function(*arguments))
    for result, wanted in [*((r, expected) for r in results[:4]), (results[4], plain)]:
        for got, right in zip(result, wanted, strict=True):
            assert (got is None) == (right is None), lines
            if got is not None and right is not None:
                torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12, msg=str(lines))
