"""Registry of the programs, and the parts that they share."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from maintenance.sweeps.foreign import Note, Program

PROGRAMS: dict[str, Program] = {}

#: Reason why the values of some ops are not copied in a program.
WRITTEN = "the program writes through this view, and a copied view is no longer a view of its base"
#: The same, of functions that are given the parameters of a module whose gradients they compute.
PASSED = (
    "it asks for gradients by the parameters that it was given, and a copy is not one that the "
    "module computes with"
)

#: Warning of a program that saves its model under a tool that edits it.
SAVES = r"((state_dict|torch\.save) writes the model without)?"


def program(
    name: str,
    counts: Mapping[str, int] | None = None,
    backward: Mapping[str, int] | None = None,
    **options: Any,
) -> Callable[[Callable[[Note], None]], Callable[[Note], None]]:
    """Register a program."""

    def enter(run: Callable[[Note], None]) -> Callable[[Note], None]:
        PROGRAMS[name] = Program(name, run, counts or {}, backward or {}, **options)
        return run

    return enter


# Shared: a net of two linear layers, and 12 samples of 6 features in 3 classes.


def net() -> nn.Sequential:
    """Return the net with random weights."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def samples() -> TensorDataset:
    """Return the samples."""
    return TensorDataset(torch.randn(12, 6), torch.randint(0, 3, (12,)))


def train(note: Note, model: Any, data: Any, optimizer: Any = None) -> None:
    """Train for one epoch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for features, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        note.training(model, loss)


#: Counts of one epoch of three batches.
EPOCH = {"linear": 6, "relu": 3, "dropout": 3, "cross_entropy_loss": 3}
EPOCH_BACKWARD = {"AddmmBackward0": 6, "ReluBackward0": 3, "NllLossBackward0": 3}


def times(number: int, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of several such epochs."""
    return {op_type: number * count for op_type, count in counts.items()}
