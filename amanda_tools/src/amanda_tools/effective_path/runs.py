"""What was seen of one run: the executions of its operators, and the values that they had."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda_core.interface.facts import DENSE, Facts, NotReadableError
from amanda_tools.effective_path.model import LayerRule, PathEnd
from amanda_tools.graph.values import Port
from amanda_tools.kit.tensors.values import host, numbers

__all__ = ["Execution", "Run", "array_of"]


def array_of(facts: Facts, value: Any) -> Any:
    """Return a copy of a tensor's values as a NumPy array, and anything else unchanged.

    A tensor without a plain array of values is returned unchanged as well; no rule uses it as an
    operand.
    """
    if not facts.is_tensor(value) or facts.layout(value) != DENSE:
        return value
    try:
        held = host(facts, value)
    except NotReadableError:
        return value
    return numbers(held.array, held.dtype)


@dataclass
class Execution:
    """One execution of an operator.

    Attributes:
        name: Readable name of the operator.
        type: Common type of the operator, or the framework's.
        rule: How paths go through it; None if they do not.
        inputs: Origins of the tensors at each input position.
        constant: Input positions whose value does not change between runs.
        given: Inputs and attributes by name; tensors that are not operands are arrays.
        outputs: Ports of its outputs.
        output: Port of its first output; None if that is not a tensor.
        weight: Its weight as an array.
        weight_key: The parameter, or the part of it, that the weight is; None if it is none.
        order: Its number among the executions of the run; in a graph, the number of its operator.
        program: Number of the graph or function body that contains it; None in eager modes.
    """

    name: str
    type: str
    rule: LayerRule | None
    inputs: list[list[Port]] = field(default_factory=list)
    constant: frozenset[int] = frozenset()
    given: dict[str, Any] = field(default_factory=dict)
    outputs: list[Port] = field(default_factory=list)
    output: Port | None = None
    weight: Any = None
    weight_key: str | None = None
    order: int = 0
    program: int | None = None

    def ports(self, positions: Sequence[int] | None = None) -> list[Port]:
        """Return the origins of the tensors at these input positions, or at all of them."""
        if positions is None:
            return list(itertools.chain.from_iterable(self.inputs))
        return [port for at in positions if at < len(self.inputs) for port in self.inputs[at]]


@dataclass
class Run:
    """Executions since the end of the previous run.

    Attributes:
        executions: The executions, each after those whose values it takes.
        arrays: Values of operands and outputs.
        made: Values that operators produced.
        fixed: Values that no operator produced and that are not an input of the network.
        unseen: Values whose producer was not seen or not followed.
        writes: Number of an execution that wrote an input in place -> the end of paths there.
    """

    executions: list[Execution] = field(default_factory=list)
    arrays: dict[Port, Any] = field(default_factory=dict)
    made: set[Port] = field(default_factory=set)
    fixed: set[Port] = field(default_factory=set)
    unseen: dict[Port, PathEnd] = field(default_factory=dict)
    writes: dict[int, PathEnd] = field(default_factory=dict)
