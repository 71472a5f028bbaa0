"""The values that a routine on the host gets: as arguments of a custom operator, and put together.

An operator of a graph takes tensors and integers; everything else that a routine selects is a
constant, which stays here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amanda_core.driver_kit import Step
from amanda_driver_torch.torch_internals.dynamo import tree_leaves, tree_map

__all__ = ["Selection"]


class Selection:
    """The tensors and symbolic numbers that a routine gets, apart from its constants.

    Attributes:
        sources: The tensors, and behind them the symbolic floats as tensors.
        tensors: The same without their gradients.
        numbers: The symbolic integers.
        places: Position that holds only tensors -> their indices among `tensors`.
        is_empty: Whether the routine gets none of the values that it selects.
    """

    def __init__(self, step: Step, values: Sequence[Any]) -> None:
        wanted = step.action.positions
        if wanted is not None and any(position >= len(values) for position in wanted):
            step(values)  # Raises the error that names the position.
        self.sources: list[Any] = []
        self.tensors: list[Any] = []
        self.numbers: list[Any] = []
        self.places: dict[int, list[int]] = {}
        self._floats: list[Any] = []
        self._whole: list[Any] = [None] * len(values)
        positions = range(len(values)) if wanted is None else wanted
        self.is_empty = bool(positions) and all(values[position] is None for position in positions)
        for position in positions:
            before = len(self.tensors)
            self._whole[position] = tree_map(self._placed, values[position])
            leaves = tree_leaves(values[position])
            if leaves and len(self.tensors) - before == len(leaves):
                self.places[position] = list(range(before, len(self.tensors)))
        self._floats_at = slice(len(self.tensors), len(self.tensors) + len(self._floats))
        self.sources += self._floats
        self.tensors += self._floats
        self._floats = []

    def _placed(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.sources.append(value)
            self.tensors.append(value.detach())
            return _Slot(0, len(self.tensors) - 1)
        if isinstance(value, torch.SymInt):
            self.numbers.append(value)
            return _Slot(1, len(self.numbers) - 1)
        if isinstance(value, torch.SymFloat):
            # AOTAutograd would bind compiled code to the value if it were used in another way.
            one: Any = torch.ones((), dtype=torch.float64)
            self._floats.append(one * value)
            return _Slot(2, len(self._floats) - 1)
        return value

    @property
    def wants_gradients(self) -> bool:
        """True if gradients of its tensors are computed."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.sources)

    def take(self) -> tuple[list[Any], list[Any]]:
        """Return the tensors and numbers, and keep only what a routine on the host needs."""
        given = self.tensors, self.numbers
        self.sources, self.tensors, self.numbers = [], [], []
        return given

    def whole(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """Return the values at all positions; None at those that the routine does not get."""
        given = tensors, numbers, [one.item() for one in tensors[self._floats_at]]

        def filled(value: Any) -> Any:
            return given[value.kind][value.index] if isinstance(value, _Slot) else value

        return [tree_map(filled, value) for value in self._whole]

    def results(self, values: Sequence[Any], found: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return the positions of tensors with the results for them."""
        changes: list[tuple[int, Any]] = []
        for position, places in self.places.items():
            new = [found[place] for place in places]
            is_list = isinstance(values[position], (list, tuple))
            changes.append((position, type(values[position])(new) if is_list else new[0]))
        return changes


class _Slot:
    def __init__(self, kind: int, index: int) -> None:
        self.kind, self.index = kind, index
