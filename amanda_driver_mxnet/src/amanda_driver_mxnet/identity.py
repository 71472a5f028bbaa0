"""MXNet's part of the rule of op identity: frames, blocks, weights.

The rule itself is in the core (`identity.sites`). Operands are the handles of arrays, because
arrays cannot be referred to weakly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from amanda_core.driver_kit import (
    EagerNames,
    Labels,
    Layouts,
    Memory,
    Rules,
    contiguous,
    kind_by,
    zone_of,
)
from amanda_driver_mxnet.facts import FACTS
from amanda_driver_mxnet.mxnet_internals import arrays

__all__ = ["NAMES"]

_ZONES = {
    "mxnet.optimizer": "optimizer",
    "mxnet.lr_scheduler": "optimizer",
    "mxnet.gluon.trainer": "optimizer",
    "mxnet.initializer": "init",
    "mxnet.gluon.parameter": "init",
    "mxnet.gluon.data": "data",
    "mxnet.io": "data",
    "mxnet.metric": "metrics",
}


#: Outside of blocks, an array with `attach_grad` is a weight, if it is not the first operand.
_RULES = Rules(
    kind_of=kind_by("mxnet", arrays.BLOCK_CALL, __file__),
    zone_of=partial(zone_of, _ZONES, arrays.BLOCK_CALL),
    tensor_types=frozenset({arrays.HANDLE}),
    is_weight=arrays.has_gradient_buffer,
    is_layered=True,
)


class _Labels(Labels):
    def tensor(self, token: int) -> Any:
        handle = super().tensor(token)
        return None if handle is None else arrays.array_of(handle)


def _memory(value: Any) -> Memory | None:
    """Return where an array lies: arrays are contiguous, and all of main memory counts as one."""
    array = arrays.array_of(value) if isinstance(value, arrays.HANDLE) else value
    if array is None or FACTS.layout(array) != "dense" or FACTS.device(array) != "cpu":
        return None
    address, size = arrays.address_of(array), FACTS.nbytes(array)
    return contiguous("cpu", address, arrays.shape_of(array), size) if address and size else None


_LAYOUTS = Layouts(
    memory=_memory,
    shape=arrays.shape_of,
    hold=lambda value: None,
    base=lambda value: getattr(value, "handle", value),
    # A parameter outside of Gluon's blocks is an array like any other.
    is_parameter=lambda value: False,
    is_weight=arrays.has_gradient_buffer,
    version=lambda value: None,
    attribute=arrays.data_of,
)

NAMES = EagerNames("mxnet", _RULES, arrays.children_of, arrays.parameters_of, _LAYOUTS, _Labels)
