"""The reference for every backend: results and gradients of a model in plain Python.

Owns an evaluator and a reverse-mode derivative on nested lists, and the effect of edits on both. It
shares no code with any driver or the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda_core.testing.kit.models import Model, Node, Value

__all__ = ["Edit", "Edits", "Trace", "differentiate", "evaluate", "mapped", "same"]

#: Changes a single number.
Edit = Callable[[float], float]


@dataclass(frozen=True)
class Edits:
    """Edits of tools by op; keys name an op by its result.

    Attributes:
        before: (result, position) -> change of that input, for this op only.
        after: result -> change of the op's result, for all its readers.
        grad_before: result -> change of the whole gradient that arrives at the op.
        grad_after: (result, position) -> change of the op's contribution to an input's gradient.
        backward: result -> the op's contributions, computed from the gradient that arrives.
    """

    before: Mapping[tuple[str, int], Edit] = field(default_factory=dict)
    after: Mapping[str, Edit] = field(default_factory=dict)
    grad_before: Mapping[str, Edit] = field(default_factory=dict)
    grad_after: Mapping[tuple[str, int], Edit] = field(default_factory=dict)
    backward: Mapping[str, Callable[[Value], Sequence[Value]]] = field(default_factory=dict)


@dataclass
class Trace:
    """One run of a model.

    Attributes:
        outputs: The model's outputs.
        operands: For each execution, its result's name and the values that the op ran on.
        results: For each execution, what its readers got.
        gradients: Name of an input or parameter -> its gradient.
        arriving: Result -> the whole gradient that arrived at that op.
        contributions: (result, position) -> the op's part of that input's gradient.
    """

    outputs: list[Value] = field(default_factory=list)
    operands: list[tuple[str, list[Value]]] = field(default_factory=list)
    results: list[tuple[str, Value]] = field(default_factory=list)
    gradients: dict[str, Value] = field(default_factory=dict)
    arriving: dict[str, Value] = field(default_factory=dict)
    contributions: dict[tuple[str, int], Value] = field(default_factory=dict)


def mapped(function: Callable[..., float], *values: Value) -> Value:
    """Apply `function` to each number, or to the numbers at the same place of several values."""
    if isinstance(values[0], list):
        return [mapped(function, *items) for items in zip(*values, strict=True)]
    return function(*values)


def same(found: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Return True if shapes agree and no number differs by more than `tolerance`, relatively."""
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(
            same(one, other, tolerance) for one, other in zip(found, expected, strict=True)
        )
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    return found is None and expected is None


_FORWARD: Mapping[str, Callable[..., Value]] = {
    "add": lambda x, y: mapped(lambda a, b: a + b, x, y),
    "mul": lambda x, y: mapped(lambda a, b: a * b, x, y),
    "relu": lambda x: mapped(lambda a: max(a, 0.0), x),
    "tanh": lambda x: mapped(math.tanh, x),
    "exp": lambda x: mapped(math.exp, x),
    "sum": lambda x: _total(x),
    "matmul": lambda x, y: _product(x, y),
}
#: From the gradient and the operands to the operands' gradients.
_BACKWARD: Mapping[str, Callable[..., Sequence[Value]]] = {
    "add": lambda g, x, y: (g, g),
    "mul": lambda g, x, y: (
        mapped(lambda s, b: s * b, g, y),
        mapped(lambda s, a: s * a, g, x),
    ),
    "relu": lambda g, x: (mapped(lambda s, a: s if a > 0 else 0.0, g, x),),
    "tanh": lambda g, x: (mapped(lambda s, a: s * (1 - math.tanh(a) ** 2), g, x),),
    "exp": lambda g, x: (mapped(lambda s, a: s * math.exp(a), g, x),),
    "sum": lambda g, x: (mapped(lambda a: g, x),),
    "matmul": lambda g, x, y: (_product(g, _turned(y)), _product(_turned(x), g)),
}


def _total(value: Any) -> float:
    return math.fsum(map(_total, value)) if isinstance(value, list) else value


def _turned(matrix: Any) -> Any:
    return [list(column) for column in zip(*matrix, strict=True)]


def _product(x: Any, y: Any) -> Value:
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in _turned(y)] for row in x
    ]


@dataclass
class _Execution:
    node: Node
    #: Each operand as (name, how often the name was bound before).
    read: list[tuple[str, int]]
    written: tuple[str, int]
    operands: list[Value]


def _forward(
    model: Model, values: Mapping[str, Value], edits: Edits
) -> tuple[Trace, list[_Execution], dict[str, int]]:
    trace, executions = Trace(), []
    known = dict(values)
    # A loop binds names again; gradients are those of one binding.
    version = dict.fromkeys(known, 0)
    for number in range(model.times):
        if number:
            known[model.inputs[0]] = known[model.outputs[0]]
            version[model.inputs[0]] = -version[model.outputs[0]]
        for node in model.nodes:
            operands = [known[name] for name in node.operands]
            for place, operand in enumerate(operands):
                edit = edits.before.get((node.result, place))
                operands[place] = operand if edit is None else mapped(edit, operand)
            read = [_binding(model, name, version) for name in node.operands]
            result = _FORWARD[node.common_type](*operands)
            if node.result in edits.after:
                result = mapped(edits.after[node.result], result)
            known[node.result] = result
            version[node.result] = version.get(node.result, 0) + 1
            trace.operands.append((node.result, operands))
            trace.results.append((node.result, result))
            written = (node.result, version[node.result])
            executions.append(_Execution(node, read, written, operands))
    trace.outputs = [known[name] for name in model.outputs]
    return trace, executions, version


def _binding(model: Model, name: str, version: Mapping[str, int]) -> tuple[str, int]:
    if version[name] < 0:  # The loop's own value: the output of the round before.
        return model.outputs[0], -version[name]
    return name, version[name]


def evaluate(model: Model, values: Mapping[str, Value], edits: Edits | None = None) -> Trace:
    """Run a model.

    >>> from amanda_core.testing.kit.models import MODELS
    >>> evaluate(MODELS["tied"], {"x": 2.0, "w": 3.0}).outputs
    [9.0]
    """
    return _forward(model, values, edits or Edits())[0]


def differentiate(
    model: Model,
    values: Mapping[str, Value],
    seeds: Sequence[Value],
    edits: Edits | None = None,
) -> Trace:
    """Run a model and its backward program.

    Edits of values are not differentiated: an op's own formula sees the value that it ran on, and
    the gradient goes straight through to where the original value came from.

    >>> from amanda_core.testing.kit.models import MODELS
    >>> differentiate(MODELS["tied"], {"x": 2.0, "w": 3.0}, [1.0]).gradients
    {'x': 3.0, 'w': 3.0}
    """
    edits = edits or Edits()
    trace, executions, version = _forward(model, values, edits)
    arriving: dict[tuple[str, int], Value] = {}

    def add(binding: tuple[str, int], gradient: Value) -> None:
        old = arriving.get(binding)
        arriving[binding] = gradient if old is None else mapped(lambda a, b: a + b, old, gradient)

    for name, seed in zip(model.outputs, seeds, strict=True):
        add((name, version[name]), seed)
    for execution in reversed(executions):
        if execution.written not in arriving:
            continue
        node, gradient = execution.node, arriving[execution.written]
        if node.result in edits.grad_before:
            trace.arriving[node.result] = gradient
            gradient = mapped(edits.grad_before[node.result], gradient)
        trace.arriving.setdefault(node.result, gradient)
        if node.result in edits.backward:
            contributions = edits.backward[node.result](gradient)
        else:
            contributions = _BACKWARD[node.common_type](gradient, *execution.operands)
        for place, (binding, part) in enumerate(zip(execution.read, contributions, strict=True)):
            trace.contributions[node.result, place] = part
            edit = edits.grad_after.get((node.result, place))
            add(binding, part if edit is None else mapped(edit, part))
    for name in (*model.inputs, *model.parameters):
        if (name, 0) in arriving:
            trace.gradients[name] = arriving[name, 0]
    return trace
