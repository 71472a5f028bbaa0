"""MXNet's part of the rule of op identity: frames, blocks, weights.

The rule itself is in the core (`amanda_core.sites`). Operands are the handles of arrays, because
arrays cannot be referred to weakly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from mxnet.ndarray import NDArray

from amanda_core.scopes import Labels, Scopes
from amanda_core.sites import FRAMEWORK, OWN, STOP, USER, Rules
from amanda_core.weights.geometry import Memory
from amanda_core.weights.parameters import Layouts, Parameters
from amanda_driver_mxnet._mxnet_internals import arrays
from amanda_driver_mxnet.facts import FACTS

__all__ = ["RULES", "new_labels", "new_parameters", "new_scopes"]

_OWN = os.path.dirname(__file__) + os.sep
_ZONES = {
    "mxnet.optimizer": "optimizer",
    "mxnet.initializer": "init",
    "mxnet.gluon.parameter": "init",
}


def _kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    if code is arrays.BLOCK_CALL:
        return STOP
    if f"{namespace.get('__name__', '')}.".startswith("mxnet."):
        return FRAMEWORK
    return OWN if code.co_filename.startswith(_OWN) else USER


def _zone_of() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not arrays.BLOCK_CALL:
        module = str(frame.f_globals.get("__name__", ""))
        zone = next((zone for name, zone in _ZONES.items() if module.startswith(name)), None)
        if zone is not None:
            return zone
        frame = frame.f_back
    return "model"


#: Outside of blocks, an array with `attach_grad` is a weight, if it is not the first operand.
RULES = Rules(
    kind_of=_kind_of,
    zone_of=_zone_of,
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
    return _Labels(())


def new_parameters(scopes: Scopes, labels: Labels) -> Parameters:
    """Return a new table of the parameters that arrays show parts of."""
    return Parameters(scopes, labels, _LAYOUTS)


def _weights_of(block: Any) -> Iterator[tuple[str, Any, NDArray]]:
    waiting, seen = [("", block)], {id(block)}
    while waiting:
        path, owner = waiting.pop()
        for name, array in arrays.parameters_of(owner):
            yield path + name, owner, array
        for name, child in arrays.children_of(owner).items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((f"{path}{name}.", child))


def _memory(value: Any) -> Memory | None:
    """Return where an array lies: arrays are contiguous, and all of main memory counts as one."""
    array = arrays.array_of(value) if isinstance(value, arrays.HANDLE) else value
    if array is None or FACTS.layout(array) != "dense" or FACTS.device(array) != "cpu":
        return None
    shape, address = arrays.shape_of(array), arrays.address_of(array)
    size = FACTS.nbytes(array)
    if not address or not size:
        return None
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    count = strides[-1] * shape[0] if shape else 1
    itemsize = size // count
    # Memory is aligned by more than the largest element.
    place = address // itemsize
    return Memory("cpu", place, shape, tuple(reversed(strides)) if shape else (), itemsize)


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
