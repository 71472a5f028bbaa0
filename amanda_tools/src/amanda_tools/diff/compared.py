"""`Compared`: one tensor that is in both dumps, and how far it is apart."""

from __future__ import annotations

from dataclasses import dataclass

from amanda_tools.diff.numbers import Difference
from amanda_tools.kit.operators.entries import OpFacts

__all__ = ["Compared"]


@dataclass
class Compared:
    """One tensor that is in both dumps.

    Attributes:
        a: Its operator in the first dump.
        b: Its operator in the second dump.
        what: ``input``, ``weight``, ``output``, ``grad_output`` or ``grad_input``.
        position: Position in the signature of the first operator.
        step: Step in the first dump.
        execution: Execution in the first dump.
        difference: How far the tensors are apart; None if their shapes do not fit.
        shapes: Both shapes.
        dtypes: Both dtypes.
        inputs_agree: For an output, whether the inputs and weights of its execution that are in
            both dumps were within the tolerance; None if none of them is.
        weight: The parameter, or the part of it, that the tensor is or the gradient of which it is,
            as the first dump names it; None if it is none.
    """

    a: OpFacts
    b: OpFacts
    what: str
    position: str
    step: int
    execution: int
    difference: Difference | None
    shapes: list[list[int]]
    dtypes: list[str]
    inputs_agree: bool | None = None
    weight: str | None = None

    @property
    def same(self) -> bool:
        """Return True if the tensors are within the tolerance."""
        return self.difference is not None and self.difference.within

    def __str__(self) -> str:
        """Describe the tensor and its difference."""
        named = f" ({self.weight})" if self.weight is not None else ""
        place = f"{self.what} {self.position}{named} of op {self.a.name!r}"
        if self.b.name != self.a.name:
            place += f" (there {self.b.name!r})"
        place += f", module {self.a.module!r}" if self.a.module else ""
        place += f", at {self.a.source}" if self.a.source else ""
        inputs = ""
        if self.what == "output":
            inputs = {
                True: "; its inputs agreed",
                False: "; its inputs differed already",
                None: "; its inputs are not in both dumps",
            }[self.inputs_agree]
        apart = (
            f"shapes {self.shapes[0]} and {self.shapes[1]}"
            if self.difference is None
            else str(self.difference)
        )
        return f"{place}, step {self.step}, execution {self.execution}: {apart}{inputs}"
