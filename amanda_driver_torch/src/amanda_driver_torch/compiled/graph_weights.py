"""The weights of a traced graph: what of its values are parameters, buffers, or views of these.

Owns the table from the fake tensors of a graph to the tensors that they stand for, and which
leaves count as weights although a program makes new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from amanda_core.driver_kit import Known, Step
from amanda_driver_torch.compiled.choice import CannotWeave
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.operators.signature import outputs_of
from amanda_driver_torch.torch_internals.dynamo import (
    FakeTensor,
    is_made_inside,
    unset_fake_temporarily,
)
from amanda_driver_torch.torch_internals.dynamo_guards import guard_identity
from amanda_driver_torch.torch_internals.tensor_attributes import is_weight

__all__ = ["GraphWeights", "Leaves"]

_LEAVES = "leaves that are made in each step, such as inputs that require gradients"


@dataclasses.dataclass
class Leaves:
    """The leaves that are not parameters, of graphs of the same code.

    They are weights, unless the program makes new ones.

    Attributes:
        found: Place in the program -> those that were there.
        edited: Places of those that a tool edits where an operator reads them.
    """

    found: dict[Any, list[Known[bool]]] = dataclasses.field(default_factory=dict)
    edited: set[Any] = dataclasses.field(default_factory=set)


class GraphWeights:
    """The weights that one graph reads.

    Attributes:
        ids: The ids of these tensors.
    """

    def __init__(
        self,
        leaves: Leaves,
        constant: Callable[[Any], Any],
        gaps: dict[str, str],
        guards: bool,
    ) -> None:
        """Begin without any.

        Args:
            leaves: The leaves that graphs of the same code were traced with.
            constant: Returns a value that is the same in every execution of its op, else None.
            gaps: For the coverage: what is not as without tools, and why.
            guards: Whether code that is compiled of the graph holds for these weights only.
        """
        self.ids: set[int] = set()
        self._leaves, self._constant, self._gaps, self._guards = leaves, constant, gaps, guards
        #: id of a fake tensor -> the tensor, and the parameter, buffer or view of one that it
        #: stands for.
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: id of a leaf that is not a parameter -> its place in the program.
        self._sources: dict[int, Any] = {}
        #: The places of those whose values tools are not shown, unless they edit them nevertheless.
        self._hidden: set[Any] = set()

    def note(self, node: fx.Node) -> None:
        """Note what an input of the graph stands for.

        Raises:
            CannotWeave: The graph makes it.
        """
        argument = node.meta.get("grapharg")
        if argument is None or not getattr(argument, "is_tensor", False):
            return
        source, value = argument.source, argument.example
        if is_made_inside(source):
            raise CannotWeave("it makes a parameter, which has no values before it runs")
        if type(value) is FakeTensor or not isinstance(value, torch.Tensor):
            return
        if is_weight(value) and not isinstance(value, nn.Parameter):
            known = self._leaves.found.setdefault(source, [])
            if not all(known):  # One has died.
                self._sources[id(node.meta["example_value"])] = source
                self._hidden.add(source)
                self._gaps[_LEAVES] = "tools are not shown their values in compiled callables"
                return
            leaf: Known[bool] = Known()
            leaf.set(value, True)
            known.append(leaf)
            self._sources[id(value)] = source
        if is_weight(value) or self._constant(value) is not None:
            example = node.meta["example_value"]
            self._real[id(example)] = example, value
            self.ids.add(id(value))
            if self._guards:
                # What is decided for this weight does not hold for another one.
                guard_identity(source)

    def shown(self, value: Any) -> Any:
        """Return the weight that a value of the graph stands for, or else the value."""
        return self._real.get(id(value), (value, value))[1]

    def note_views(self, operator: Operator, real: Any, outputs: Sequence[Any]) -> None:
        """Let later operators get views of weights, which show where in these they lie.

        Args:
            operator: An operator that makes views.
            real: Its arguments, positional and by keyword.
            outputs: What it returns in the graph.
        """
        with unset_fake_temporarily(), torch.inference_mode(False):
            views = outputs_of(operator.func(*real[0], **real[1]))
        for output, view in zip(tensors_in(outputs), tensors_in(views), strict=True):
            self._real[id(output)] = output, view

    def note_edits(self, steps: Iterable[Step], values: Sequence[Any]) -> None:
        """Note which leaves the steps before an operator edit, given its inputs."""
        for step in steps if self._sources else ():
            chosen = range(len(values)) if step.action.positions is None else step.action.positions
            for value in () if step.action.observe else tensors_in(values[i] for i in chosen):
                if id(value) in self._sources:
                    self._leaves.edited.add(self._sources[id(value)])
                    self._hidden.discard(self._sources[id(value)])

    def check(self) -> None:
        """Refuse a graph in which a tool edits a leaf that it is not shown.

        Raises:
            CannotWeave: It does.
        """
        if self._hidden & self._leaves.edited:
            raise CannotWeave("a tool edits a weight that the program makes in each step")
