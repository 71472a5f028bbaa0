"""MindSpore's part of the rule of op identity: frames, cells, weights.

The rule itself is in the core (`identity.sites`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

from mindspore import Parameter, Tensor

from amanda_core.driver_kit import (
    FRAMEWORK,
    OWN,
    STOP,
    USER,
    Labels,
    Layouts,
    Memory,
    Parameters,
    Rules,
    Scopes,
    inside,
    modules_of,
    zone_of,
)
from amanda_driver_mindspore.mindspore_internals import cells
from amanda_driver_mindspore.mindspore_internals.doors import CELL_CALL

__all__ = ["RULES", "new_labels", "new_parameters", "new_scopes"]

_OWN = os.path.dirname(__file__) + os.sep
_ZONES = {
    "mindspore.nn.optim": "optimizer",
    "mindspore.experimental.optim": "optimizer",
    "mindspore.mint.optim": "optimizer",
    "mindspore.nn.learning_rate_schedule": "optimizer",
    "mindspore.common.initializer": "init",
    "mindspore.common.parameter": "init",
    "mindspore.dataset": "data",
    "mindspore.train.metrics": "metrics",
}


def _kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    if code is CELL_CALL:
        return STOP
    if f"{namespace.get('__name__', '')}.".startswith("mindspore."):
        return FRAMEWORK
    return OWN if code.co_filename.startswith(_OWN) else USER


RULES = Rules(
    kind_of=_kind_of,
    zone_of=partial(zone_of, _ZONES, CELL_CALL),
    weight_types=(Parameter,),
    # Parts of parameters are tensors; whole ones are marked.
    tensor_types=frozenset({Tensor}),
    is_weight=lambda value: False,
    is_layered=True,
)


def new_scopes() -> Scopes:
    """Return scopes for cells."""
    return Scopes(cells.children_of, _weights_of)


def new_labels() -> Labels:
    """Return labels for parameters outside of cells."""
    return Labels()


def new_parameters(scopes: Scopes, labels: Labels) -> Parameters:
    """Return a new table of the parameters that tensors show parts of."""
    return Parameters(scopes, labels, _LAYOUTS)


def _weights_of(cell: Any) -> Iterator[tuple[str, Any, Parameter]]:
    seen: set[int] = set()
    for path, owner in modules_of(cell, cells.children_of):
        for name, parameter in cells.parameters_of(owner):
            if id(parameter) not in seen:  # Cells may share a parameter.
                seen.add(id(parameter))
                yield inside(path, name), owner, parameter


def _memory(value: Any) -> Memory | None:
    if not isinstance(value, Tensor) or not value.nbytes or value.has_init:
        return None
    memory = value.untyped_storage()
    key = str(value.device), memory.data_ptr()
    shape, strides = tuple(value.shape), tuple(value.stride())
    return Memory(key, int(value.storage_offset()), shape, strides, int(value.itemsize))


_LAYOUTS = Layouts(
    memory=_memory,
    shape=lambda value: tuple(value.shape),
    hold=lambda value: None,
    base=lambda value: value,
    is_parameter=lambda value: isinstance(value, Parameter),
    is_weight=lambda value: False,
    # MindSpore does not count writes.
    version=lambda value: None,
    attribute=cells.parameter_of,
)
