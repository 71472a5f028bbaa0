"""Cells: what they hold, which only wrap others, and functions that read or write models."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from mindspore import Parameter, nn
from mindspore.common.recompute import _RecomputeCell, _WrapCell
from mindspore.experimental import optim

__all__ = [
    "OPTIMIZERS",
    "QUIET_FUNCTIONS",
    "WRITERS",
    "children_of",
    "parameter_of",
    "parameters_of",
    "recomputed_cell",
]

OPTIMIZERS = (nn.Optimizer, optim.Optimizer)
_WRAPPERS = (_RecomputeCell, _WrapCell)

#: Modules that have the functions; all have the same ones, bound by name.
_MODULES = ("mindspore", "mindspore.train", "mindspore.train.serialization")
#: Module -> functions that write nothing for other programs.
QUIET_FUNCTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(
    _MODULES, ("load_checkpoint", "load_param_into_net", "load")
)
#: Module -> a function that writes the model for other programs -> what it is called there.
WRITERS = {
    module: {"save_checkpoint": "mindspore.save_checkpoint", "export": "mindspore.export"}
    for module in _MODULES
}


def children_of(cell: nn.Cell) -> Mapping[str, nn.Cell]:
    """Return the cells that a cell holds, by name."""
    held: dict[str, nn.Cell] = cell._cells
    if isinstance(cell, nn.SequentialCell) and len(cell.cell_list) == len(held):
        # Mixed precision replaces the cells in the list, which is what runs.
        return dict(zip(held, cell.cell_list, strict=True))
    return held


def parameters_of(cell: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters of a cell itself, by attribute."""
    for name, parameter in cell._params.items():
        if parameter is not None:
            yield name, parameter


def parameter_of(cell: nn.Cell, name: str) -> Parameter | None:
    """Return the parameter that a cell holds by a name, or None."""
    return cell._params.get(name)


def recomputed_cell(cell: nn.Cell) -> nn.Cell | None:
    """Return the cell of which another one recomputes the values.

    Returns:
        None for an ordinary cell; for a wrapper without a cell, the wrapper itself.
    """
    if not isinstance(cell, _WRAPPERS):
        return None
    inner: Any = cell.net if isinstance(cell, _WRAPPERS[0]) else cell.function
    while isinstance(inner, _WRAPPERS[1]):
        inner = inner.function
    owner = inner.__self__ if isinstance(inner, types.MethodType) else inner
    return owner if isinstance(owner, nn.Cell) else cell
