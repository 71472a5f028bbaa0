"""MindSpore's part of the rule of op identity: frames, cells, weights.

The rule itself is in the core (`identity.sites`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspore import Parameter, Tensor

from amanda_core.driver_kit import EagerNames, Layouts, Memory, Rules, kind_by, zone_of
from amanda_driver_mindspore.mindspore_internals import cells
from amanda_driver_mindspore.mindspore_internals.doors import CELL_CALL

__all__ = ["NAMES"]

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


_RULES = Rules(
    kind_of=kind_by("mindspore", CELL_CALL, __file__),
    zone_of=partial(zone_of, _ZONES, CELL_CALL),
    weight_types=(Parameter,),
    # Parts of parameters are tensors; whole ones are marked.
    tensor_types=frozenset({Tensor}),
    is_weight=lambda value: False,
    is_layered=True,
)


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

NAMES = EagerNames("mindspore", _RULES, cells.children_of, cells.parameters_of, _LAYOUTS)
