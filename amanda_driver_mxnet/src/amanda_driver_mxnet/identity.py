"""MXNet's part of the rule of op identity: frames, blocks, weights.

The rule itself is in the core (`identity.sites`). Operands are the handles of arrays, because
arrays cannot be referred to weakly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

from mxnet.ndarray import NDArray

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
    contiguous,
    inside,
    modules_of,
    zone_of,
)
from amanda_driver_mxnet.facts import FACTS
from amanda_driver_mxnet.mxnet_internals import arrays

__all__ = ["RULES", "new_labels", "new_parameters", "new_scopes"]

_OWN = os.path.dirname(__file__) + os.sep
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


def _kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    if code is arrays.BLOCK_CALL:
        return STOP
    if f"{namespace.get('__name__', '')}.".startswith("mxnet."):
        return FRAMEWORK
    return OWN if code.co_filename.startswith(_OWN) else USER


#: Outside of blocks, an array with `attach_grad` is a weight, if it is not the first operand.
RULES = Rules(
    kind_of=_kind_of,
    zone_of=partial(zone_of, _ZONES, arrays.BLOCK_CALL),
    tensor_types=frozenset({arrays.HANDLE}),
    is_weight=arrays.has_gradient_buffer,
    is_layered=True,
)


class _Labels(Labels):
    def tensor(self, token: int) -> Any:
        handle = super().tensor(token)
        return None if handle is None else arrays.array_of(handle)


def new_scopes() -> Scopes:
    """Return scopes for Gluon's blocks."""
    return Scopes(arrays.children_of, _weights_of)


def new_labels() -> Labels:
    """Return labels for the handles of arrays."""
    return _Labels()


def new_parameters(scopes: Scopes, labels: Labels) -> Parameters:
    """Return a new table of the parameters that arrays show parts of."""
    return Parameters(scopes, labels, _LAYOUTS)


def _weights_of(block: Any) -> Iterator[tuple[str, Any, NDArray]]:
    seen: set[int] = set()
    for path, owner in modules_of(block, arrays.children_of):
        for name, array in arrays.parameters_of(owner):
            if id(array) not in seen:  # Blocks may share a parameter.
                seen.add(id(array))
                yield inside(path, name), owner, array


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
