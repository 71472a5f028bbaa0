"""Recorded operators, executed again by PyTorch's dispatcher.

Owns how the names of an operator's positions become a call of an operator of `torch.ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amanda_core.driver_kit import Repeater
from amanda_core.interface import NotReadableError
from amanda_driver_torch.torch_internals.internals import schema_of

__all__ = ["REPEATER"]

#: What `Facts.constant` may describe.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class _TorchRepeater(Repeater):
    def empty(self, shape: Sequence[int], dtype: str, device: str) -> Any:
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise NotReadableError(f"the dtype {dtype}")
        try:
            return torch.empty(tuple(shape), dtype=found, device=device or "cpu")
        except (AssertionError, RuntimeError) as error:
            raise NotReadableError(f"the device {device}: {_first_line(error)}") from error

    def form(self, tensor: Any) -> Sequence[int] | None:
        if tensor.layout is not torch.strided:
            return None
        # `matmul` asks whether gradients are needed, and `is_contiguous` does not look at the
        # strides of axes of length 1.
        strides = tuple(tensor.stride())
        is_new = strides == torch.empty(tensor.shape, device="meta").stride()
        return None if is_new and not tensor.requires_grad else (tensor.requires_grad, *strides)

    def formed(self, tensor: Any, form: Sequence[int]) -> Any:
        needs_gradient, *strides = form
        # Along an axis with stride 0 all elements are one.
        whole = tuple(tensor.shape)
        for axis, stride in enumerate(strides):
            tensor = tensor.narrow(axis, 0, 1) if stride == 0 else tensor
        # Elements that overlap otherwise, as in windows over a signal, are equal.
        found = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return found.copy_(tensor).expand(whole).requires_grad_(bool(needs_gradient))

    def constant(self, text: str) -> Any:
        found = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(found, _CONSTANTS):
            return found
        try:
            return torch.device(text)
        except RuntimeError as error:
            raise NotReadableError(f"the constant {text}") from error

    def execute(self, op_type: str, arguments: Mapping[str, Any]) -> Sequence[Any]:
        with torch.no_grad():
            if op_type == "__getitem__":  # A slot of the type, which the dispatcher does not have.
                result = operator.getitem(arguments["input"], arguments["indices"])
            else:
                result = _dispatched(op_type, arguments)
        return list(result) if isinstance(result, (list, tuple)) else [result]


REPEATER = _TorchRepeater()


def _dispatched(op_type: str, arguments: Mapping[str, Any]) -> Any:
    namespace, _, name = op_type.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    overloads = packet.overloads() if packet is not None else ()
    given = {key: value for key, value in arguments.items() if value is not None}
    method = getattr(torch.Tensor, name, None)
    if not overloads and method is not None and given.keys() == {"input"}:
        return method(given["input"])  # A conversion, which is written by hand.
    why = "it is not in PyTorch's dispatcher"
    for overload in overloads:
        declared = schema_of(getattr(packet, overload)).arguments
        names = {"input" if one.name == "self" else one.name: one for one in declared}
        if not given.keys() <= names.keys() or any(one.is_out for one in declared):
            continue
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for key, one in names.items():
            if one.kwarg_only:
                kwargs |= {one.name: given[key]} if key in given else {}
            else:
                args.append(_spread(arguments.get(key, one.default_value), one))
        try:
            return getattr(packet, overload)(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            why = _first_line(error)
    raise NotReadableError(f"the operator {op_type}: {why}")


def _spread(value: Any, argument: Any) -> Any:
    """Return a number as a list where Python's bindings accept it instead of one."""
    is_list = argument.N and "List[int]" in str(argument.type)
    return [value] * argument.N if is_list and type(value) is int else value


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
