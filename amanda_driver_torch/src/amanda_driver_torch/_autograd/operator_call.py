"""The call of an operator, as far as its gradients need to know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from amanda_core import Session
from amanda_core.driver_failures import OriginalCall
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._operators.signature import BoundCall

__all__ = ["Call"]


class Call(Protocol):
    """One call of an operator that is being executed.

    Attributes:
        session: The session.
        operator: The operator.
        original: Runs the operator.
        bound: The call, with the values given by the program.
        values: The values that the op will run on.
        mutated: Positions that the op writes.
        start: Sequence number of autograd nodes before the op ran.
        made_count: Number of nodes made since then, including the driver's.
        called: Whether the original was called before this execution began.
        tapped: Whether hooks for gradients of inputs were set in that call.
        saved: For each tensor that the op saved, whether it lies in what the op writes; None if
            that is not known.
    """

    session: Session
    operator: Operator
    original: OriginalCall
    bound: BoundCall
    values: list[Any]
    mutated: frozenset[int]
    start: int
    made_count: int
    called: bool
    tapped: bool
    saved: list[bool] | None

    def made(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors whose nodes this call made."""

    def call_original(self, values: Sequence[Any]) -> Any:
        """Run the original on values by position."""

    def outputs_of(self, returned: Any) -> list[Any]:
        """Return the outputs in what the original returned."""

    def note_unseen(self, what: str, why: str) -> None:
        """Record what an observer did not see, and why."""
