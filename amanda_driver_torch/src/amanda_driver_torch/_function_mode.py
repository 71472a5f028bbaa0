"""The interceptor in pure Python: a `TorchFunctionMode` that hands operators to the attachment.

Owns the mode and how torch's own Python wrappers are made transparent under it, so that
`F.relu` is the one operator `relu` and nothing is counted twice.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from amanda_core import Blind
from amanda_driver_torch._execute import Operator
from amanda_driver_torch._operators import (
    is_operator,
    is_operator_name,
    operator_of,
    type_name,
)
from amanda_driver_torch._patches import Patch
from amanda_driver_torch._state import STATE

if TYPE_CHECKING:
    from amanda_driver_torch._attachment import TorchAttachment

__all__ = ["FunctionModeInterceptor"]

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_DISABLED = torch._C._disabled_torch_function_impl
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class FunctionModeInterceptor:
    """Sees what torch's function protocol sees, in the thread that starts it."""

    name = "function_mode"

    def __init__(self, attachment: TorchAttachment) -> None:
        self._mode = _Mode(attachment)

    def start(self) -> None:
        """Begin to intercept in this thread."""
        self._mode.__enter__()

    def stop(self) -> None:
        """Cease, whatever other modes were pushed since and are still there."""
        self._mode.leave()

    def inside(self) -> AbstractContextManager[object]:
        """Extent that is intercepted although an operator around it is running."""
        stack = range(torch._C._len_torch_function_stack())
        if any(torch._C._get_function_stack_at(i) is self._mode for i in stack):
            return nullcontext()
        return self._mode

    def coverage(self) -> Sequence[Blind]:
        """What the function protocol does not see."""
        why = "torch's function protocol does not report it"
        return [
            Blind("torch.from_numpy, torch.frombuffer, torch.Tensor(...)", why),
            Blind("code under torch._C.DisableTorchFunction()", "it switches the protocol off"),
            Blind("bindings of C++ extensions outside torch.ops", why),
        ]


class _Mode(TorchFunctionMode):
    def __init__(self, attachment: TorchAttachment) -> None:
        super().__init__()
        self._attachment = attachment
        self._operators: dict[Any, Operator | None] = {}
        self._transparent: dict[int, tuple[Any, list[Patch]]] = {}

    def leave(self) -> None:
        above = []
        while torch._C._len_torch_function_stack():
            mode = torch._C._pop_torch_function_stack()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)
        for _, patches in self._transparent.values():
            for patch in patches:
                patch.undo()
        self._transparent.clear()

    def __torch_function__(
        self,
        func: Any,
        types_: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        attachment = self._attachment
        if not attachment.watching():
            return func(*args, **kwargs)
        if type(func) is types.FunctionType:
            return self._call_wrapper(func, args, kwargs)
        try:
            operator = self._operators[func]
        except KeyError:
            operator = self._operators[func] = (
                Operator(func, operator_of(func), type_name(func)) if is_operator(func) else None
            )
        if operator is None:
            return func(*args, **kwargs)
        return attachment.execute(operator, func, args, kwargs)

    def _call_wrapper(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python function of torch's so that the operators inside it are seen."""
        if func.__name__ in _LOOKED_AWAY:
            return func(*args, **kwargs)
        if _has_override(args) or _has_override(tuple(kwargs.values())):
            # The subclass wants to see this very function, so the function is the operator.
            if func.__module__ == "torch.nn.functional" or is_operator_name(func.__name__):
                operator = Operator(func, func, func.__name__)
                return self._attachment.execute(operator, func, args, kwargs)
            return func(*args, **kwargs)
        self._make_transparent(func.__globals__)
        with self, _Transparent():
            return func(*args, **kwargs)

    def _make_transparent(self, namespace: dict[str, Any]) -> None:
        if id(namespace) in self._transparent:
            return
        holder = types.SimpleNamespace()
        holder.__dict__ = namespace  # type: ignore[assignment]
        patches = [
            Patch(holder, name, _asking(name, namespace[name]))
            for name in _ASKS
            if name in namespace
        ]
        self._transparent[id(namespace)] = (namespace, patches)


class _Transparent:
    """Extent in which torch's Python functions look for overriding types only, not for modes."""

    def __enter__(self) -> None:
        STATE.transparent += 1

    def __exit__(self, *_: object) -> None:
        STATE.transparent -= 1


def _asking(name: str, original: Any) -> Any:
    # The three differ in how they take their arguments: one iterable, one value, any number.
    if name == "has_torch_function":

        def ask(args: Any) -> bool:
            return _has_override(args) if STATE.transparent else original(args)

    elif name == "has_torch_function_unary":

        def ask(args: Any) -> bool:
            return _has_override((args,)) if STATE.transparent else original(args)

    else:

        def ask(*args: Any) -> bool:
            return _has_override(args) if STATE.transparent else original(*args)

    return ask


def _has_override(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if isinstance(value, (list, tuple)):
            if _has_override(value):
                return True
        elif (
            getattr(kind, "__torch_function__", _DISABLED) is not _DISABLED
            and torch._C._is_torch_function_enabled()
            and not issubclass(kind, torch.nn.Parameter)
        ):
            return True
    return False


# Functions that are not made of the model's operators: the engine has its own way in, and the
# rest looks at a tensor, copies it or moves it between processes.
_LOOKED_AWAY = frozenset(
    {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook"}
    | {"__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "__setstate__", "__dir__"}
    | {"__len__", "__hash__", "__array__", "__dlpack__", "__dlpack_device__", "share_memory_"}
    | {"is_shared", "storage", "storage_type", "_typed_storage", "_reduce_ex_internal"}
)
