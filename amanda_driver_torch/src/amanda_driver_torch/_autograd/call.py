"""What is known of the call of an operator where its gradients are seen to."""

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
        original: What runs the operator.
        bound: The call, with the values that the program gave.
        values: The values that the op is to run on.
        mutated: Positions that the op writes.
        start: Sequence number of autograd nodes before the op ran.
        made_count: Number of nodes made since then, those of the driver's included.
        called: Whether the original has been called before this execution began.
        tapped: Whether gradients of inputs were seen to in that call.
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

    def made(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors whose nodes this call made."""

    def call_original(self, values: Sequence[Any]) -> Any:
        """Run the original on values by position."""

    def outputs_of(self, returned: Any) -> list[Any]:
        """Return the outputs in what the original returned."""

    def note_unseen(self, what: str, why: str) -> None:
        """Note what an observer did not see, and why."""
