"""What is done to the operands of an operator: a number format, or zeros.

Owns which operands are changed and how; `tool` estimates the damage, and `measure` does it.
"""

from __future__ import annotations

from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_tools.kit.tensors.types import is_real
from amanda_tools.kit.tensors.values import host, numbers
from amanda_tools.quantize.fake import quantize_now
from amanda_tools.quantize.formats import Format, format_named
from amanda_tools.quantize.operands import Operand, operands_of, shared_axes

__all__ = ["Axes", "Change"]

#: The axes whose elements share a scale; None for all.
Axes = tuple[int, ...] | None


class Change:
    """The quantization or pruning of operands.

    Args:
        weights: Number format of weights, or ``none``. Each channel has a scale.
        activations: Number format of the other operands, or ``none``. Each tensor has a scale.
        sparsity: If given, this fraction of each weight is set to zero instead.

    Raises:
        ValueError: The format does not exist, or `sparsity` is not between 0 and 1.
    """

    def __init__(self, weights: str, activations: str, sparsity: float | None) -> None:
        if sparsity is not None and not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must be from 0 to 1, but is {sparsity}")
        self._formats = format_named(weights), format_named(activations)
        self._sparsity = sparsity
        self._text = (
            f"weights in {weights}, other operands in {activations}"
            if sparsity is None
            else f"weights with {sparsity:.0%} of zeros"
        )

    def __str__(self) -> str:
        return self._text

    def operands(self, context: OpContext, facts: Facts) -> list[tuple[Operand, Axes]]:
        """Return the operands of an op that are changed, and the axes that share a scale."""
        found = []
        for operand in operands_of(context, facts) if context.zone == "model" else []:
            if operand.is_bias or operand.item is not None or not self._changes(operand):
                continue
            inputs: Any = context.get_inputs()
            rank = len(facts.shape(inputs[operand.position]) or ())
            # Other executions may have an activation with another number of axes.
            shared = None if operand.weight is None else shared_axes(context, operand, rank)
            found.append((operand, shared if shared is None else tuple(shared)))
        return found

    def applied(self, facts: Facts, value: Any, operand: Operand, axes: Axes) -> Any:
        """Return an operand as changed.

        Raises:
            NotReadableError: It cannot be changed.
        """
        import numpy

        if not is_real(facts, value):
            raise NotReadableError("a value is not a tensor of real floating-point numbers")
        tensor = host(facts, value)
        if self._sparsity is None:
            form = self._formats[operand.weight is None]
            assert isinstance(form, Format)
            return quantize_now(value, facts=facts, axes=axes, form=form)[0]
        kept = numpy.array(numbers(tensor.array, tensor.dtype))
        order = numpy.argsort(abs(kept), axis=None, kind="stable")
        kept.reshape(-1)[order[: round(self._sparsity * kept.size)]] = 0
        return facts.cast(kept, value)

    def _changes(self, operand: Operand) -> bool:
        if self._sparsity is not None:
            return operand.weight is not None
        return self._formats[operand.weight is None] is not None
