"""Trying a tool without a framework: a toy program under it, and a check of its result.

For authors of tools. Owns one program of a few operators, forward and backward, whose numbers can
be computed by hand, and the check of what `amanda run` and `amanda show` need of a result.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import amanda
from amanda_core.results import tables as results
from amanda_core.results.output import Output
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import registered

__all__ = ["OPERATORS", "ToyRun", "check_result", "run_toy_program"]

#: The readable names of the toy program's operators, in the order in which they run.
OPERATORS = ("hidden/linear", "hidden/relu", "pair", "total", "output/linear", "mul")


@dataclass
class ToyRun:
    """The result of a run of the toy program.

    Attributes:
        losses: The loss of each step.
        gradients: Parameter -> its gradient in the last step.
        parameters: Parameter -> its value after the last step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float | None] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)


def run_toy_program(*tools: amanda.Tool, steps: int = 1, rate: float = 0.125) -> ToyRun:
    """Train a toy model under tools: `OPERATORS` in each step, then backward and an update.

    The program has what tools are likely to miss: an operator with two outputs (``pair``), one
    whose input is a list (``total``), two calls of one operator, one of them without an argument
    (``linear``), and operators inside and outside of modules.

    Args:
        *tools: The tools. Without tools the program runs plain, to compare with.
        steps: How many steps to train.
        rate: The learning rate.

    Returns:
        The losses, gradients and parameters.

    >>> run_toy_program().gradients
    {'weight': 66.0, 'bias': 33.0, 'scale': 484.0}
    """
    parameters = {
        "weight": toy.parameter(3.0, "weight"),
        "bias": toy.parameter(1.0, "bias"),
        "scale": toy.parameter(0.5, "scale"),
    }
    run = ToyRun()
    with contextlib.ExitStack() as extent:
        if tools:
            extent.enter_context(registered())
            extent.enter_context(amanda.apply(*tools))
        for _ in range(steps):
            loss = _loss(toy.Value(2.0, name="x"), **parameters)
            toy.backward(loss)
            run.losses.append(loss.data)
            run.gradients = {name: value.grad for name, value in parameters.items()}
            toy.update([*parameters.values()], rate)
    run.parameters = {name: value.data for name, value in parameters.items()}
    return run


def _loss(x: toy.Value, weight: toy.Value, bias: toy.Value, scale: toy.Value) -> toy.Value:
    with toy.scope("hidden"):
        hidden = toy.linear(x, weight, bias)
        hidden = toy.relu(hidden)
    more, twice = toy.pair(hidden)
    both = toy.total([more, twice])
    with toy.scope("output"):
        output = toy.linear(both, scale)
    return toy.mul(output, output)


def check_result(result: Any) -> dict[str, Any]:
    """Check that `amanda run` can show and write a result, and `amanda show` can read it.

    Args:
        result: What the tool's ``result()`` returned.

    Returns:
        The content of its JSON.

    Raises:
        AssertionError: The result lacks something; the message says what.
        ResultError: Its JSON is invalid.
        OutputError: It writes outside of the folder that it is given.
    """
    kind = type(result).__name__
    assert isinstance(result, results.Result), f"{kind} needs the methods table() and to_json()"
    table = result.table()
    assert isinstance(table, results.Table), f"table() of {kind} must return a Table, not {table!r}"
    str(table)
    with tempfile.TemporaryDirectory() as folder:
        output = Output(Path(folder) / "out", ["tool"])
        content = results.load(output.write("tool", result)[0])
    assert isinstance(content, dict), f"to_json() of {kind} must be an object, such as {{...}}"
    assert isinstance(content.get("format"), str), (
        f"to_json() of {kind} must have a 'format', such as 'my-tool/1': `amanda show` tells by it "
        "that a file is a result, and whoever reads it, which version"
    )
    named: dict[str, Any] = content
    return named
