"""`Prune`: static pruning of weights by magnitude, on every backend with the common words.

Owns which weights are pruned and by which mask. How a mask is made of a framework's tensor is a
mapping rule; the routine multiplies, as all tensors can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.action import staged
from amanda_core.facts import NotReadableError
from amanda_core.results import Table
from amanda_tools.mapping import MappingTool
from amanda_tools.operators.clock import Clock
from amanda_tools.output.rendering import counted, dataframe, html_of, share
from amanda_tools.tensors.types import size_of
from amanda_tools.tensors.values import facts_of

__all__ = ["Prune", "PruneResult", "PrunedWeight"]

#: Words of the operators that multiply by a weight.
_WORDS = frozenset(
    {"linear", "matmul", "conv1d", "conv2d", "conv3d"}
    | {f"conv_transpose{dimensions}d" for dimensions in (1, 2, 3)}
)
#: Axes of any layout of a weight in one order, so that equal magnitudes are cut alike everywhere.
_AXES = "OIDHW"
#: Key of a context: the function that makes a mask, ``(weight, axes, count) -> mask``.
_MASK = "prune.mask"


@dataclass
class PrunedWeight:
    """One weight.

    Attributes:
        op: Readable name of the operator that uses it.
        source: ``file:line`` of the operator's call, or None.
        shape: Its shape.
        elements: How many it has.
        pruned: How many of them are set to zero.
    """

    op: str
    source: str | None
    shape: list[int]
    elements: int
    pruned: int


@dataclass
class PruneResult:
    """Which weights are pruned.

    Attributes:
        sparsity: The fraction that was asked for.
        weights: The weights.
        skipped: Names of operators that could have had a weight and have none that is known before
            they run: products of two activations, or weights that are computed.
        tool_seconds: Time that making the masks took. That of multiplying by them in each
            execution is not in it: in a graph they are operators of the program.
        notes: What cannot be pruned, and why.
    """

    sparsity: float
    weights: list[PrunedWeight] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    tool_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """One row for each weight, and their sum."""
        rows = [(w.op, str(tuple(w.shape)), w.elements, w.pruned) for w in self.weights]
        elements = sum(w.elements for w in self.weights)
        pruned = sum(w.pruned for w in self.weights)
        told = [f"{share(pruned, elements) or 'nothing'} of the weights pruned"]
        if self.skipped:
            told.append(
                f"{counted(len(self.skipped), 'product')} without a known weight NOT pruned"
            )
        told.append(f"making masks took {self.tool_seconds:.3g} s")
        told += self.notes
        columns = ("op", "weight", "elements", "pruned")
        return Table("; ".join(told), columns, [*rows, ("all", "", elements, pruned)])

    def to_json(self) -> str:
        """All of it."""
        return json.dumps({"format": "amanda.prune/1", **asdict(self)}, indent=1)

    def to_dataframe(self) -> Any:
        """One row for each weight, as a `pandas.DataFrame`; needs pandas."""
        return dataframe(PrunedWeight, self.weights)

    def _repr_html_(self) -> str:
        return html_of([self.table()])


@staged
def multiply(value: Any, mask: Any) -> Any:
    """The weight or gradient without what is pruned. Pure, so it may become part of a graph."""
    return value * mask


class Prune(Tool):
    """Sets the smallest weights of each convolution and linear layer to zero, by magnitude.

    The weights themselves stay as they are: each operator is given its weight times a mask, which
    is made once, of the weight at the operator's first execution. The gradients of the weights are
    masked likewise. Of equal magnitudes the first go first, so the number is exact.

    Args:
        sparsity: The fraction of each weight that is set to zero, from 0 to 1.
        gradients: Whether to mask the gradients of the weights as well.

    Raises:
        ValueError: `sparsity` is no fraction.

    >>> tool = Prune(sparsity=0.5)
    """

    def __init__(self, sparsity: float, gradients: bool = True) -> None:
        super().__init__()
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must be from 0 to 1, and is {sparsity}")
        self.sparsity = sparsity
        self.gradients = gradients
        self._result = PruneResult(sparsity)
        self._clock = Clock()
        self.depends_on(
            MappingTool(
                [
                    ["*", _by_values],
                    ["tensorflow", _by(numpy_mask)],
                    ["pytorch", _by(torch_mask)],
                ]
            )
        )
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Prune the op's weight, if it has one."""
        if context["type"] not in _WORDS:
            return
        position, layout = _weight_of(context), context.get("weight_layout")
        weight = context.value(position) if position is not None else None
        if position is None or weight is None or layout is None:
            self._result.skipped.append(context.name)
            return
        facts = context.facts
        if facts is None or not hasattr(type(weight), "__mul__"):
            why = "its tensors cannot be read" if facts is None else "its tensors have no product"
            self._note(f"not supported on {context.namespace}: {why}")
            return
        shape = list(size_of(facts, weight))
        elements = math.prod(shape)
        count = round(self.sparsity * elements)
        axes = [layout.index(axis) for axis in _AXES if axis in layout]
        try:
            with self._clock:
                mask = context[_MASK](weight, axes, count)
        except NotReadableError as error:
            self._note(f"{context.name} is not pruned: {error}")
            return
        self._result.weights.append(
            PrunedWeight(context.name, context.source, shape, elements, count)
        )
        context.insert_before_op(multiply, inputs=[position], mask=mask)
        if self.gradients:
            context.insert_after_backward_op(multiply, grad_inputs=[position], mask=mask)

    def result(self) -> PruneResult:
        """Which weights are pruned so far."""
        found = self._result
        return PruneResult(
            found.sparsity,
            list(found.weights),
            list(found.skipped),
            self._clock.spent / 1e9,
            list(found.notes),
        )

    def _note(self, text: str) -> None:
        if text not in self._result.notes:
            self._result.notes.append(text)


def _by(mask: Callable[[Any, list[int], int], Any]) -> Callable[[OpContext], None]:
    def rule(context: OpContext) -> None:
        context[_MASK] = mask

    return rule


def _by_values(context: OpContext) -> None:
    facts = facts_of(context)

    def mask(weight: Any, axes: list[int], count: int) -> Any:
        return numpy_mask(facts.values(weight), axes, count)

    context[_MASK] = mask


def _weight_of(context: OpContext) -> int | None:
    roles: tuple[str, ...] = context.get("input_roles", ())
    return next((roles.index(role) for role in ("weight", "right") if role in roles), None)


def numpy_mask(weight: Any, axes: list[int], count: int) -> Any:
    """0 for the `count` smallest magnitudes and 1 for the others, as an array like `weight`."""
    import numpy as np

    array = np.asarray(weight)
    ordered = array.transpose(axes)
    mask = np.ones(ordered.size, array.dtype)
    mask[np.argsort(np.abs(ordered), axis=None, kind="stable")[:count]] = 0
    return mask.reshape(ordered.shape).transpose(np.argsort(axes))


def torch_mask(weight: Any, axes: list[int], count: int) -> Any:
    """The same as a tensor on the weight's device."""
    import torch

    with torch.no_grad():
        ordered = weight.detach().permute(axes)
        magnitudes = ordered.abs().flatten()
        smallest = magnitudes.argsort(stable=True)[:count]
        # Not by an index: a distributed tensor takes none that is another kind of tensor.
        mask = torch.ones_like(magnitudes, dtype=weight.dtype).scatter(0, smallest, 0)
        back = sorted(range(len(axes)), key=axes.__getitem__)
        return mask.reshape(ordered.shape).permute(back)
