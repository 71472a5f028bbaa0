"""Makes torch's own Python wrappers transparent, so that the operators inside them are seen.

Owns the replacement of ``has_torch_function*`` in the namespaces of such wrappers. On request of a
thread, these look for overriding types only and not for modes. `F.relu` then runs the one operator
`relu`, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional
from torch.overrides import TorchFunctionMode

from amanda_core.driver_kit import Patches
from amanda_driver_torch.interception.patches import PATCHES
from amanda_driver_torch.operators.operator import Args, Kwargs
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.internals import (
    function_mode_at,
    function_mode_count,
    function_protocol_enabled,
    no_override,
)
from amanda_driver_torch.torch_internals.tensor_attributes import PLAIN

__all__ = ["call_transparently", "has_override", "make_transparent", "run_transparently"]


R = TypeVar("R")


def run_transparently(mode: TorchFunctionMode, wrapper: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a wrapper of torch, whose namespace is transparent, so that a mode sees the operators
    inside it.
    """
    running = len(STATE.transparent)
    try:
        STATE.transparent.append(wrapper)
        with mode:
            result = wrapper(*args, **kwargs)
        del STATE.transparent[running:]
        return result
    except BaseException:
        del STATE.transparent[running:]
        raise


def has_override(values: Any) -> bool:
    """Return True if the type of any value overrides torch's functions, regardless of modes."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            continue
        if isinstance(value, (list, tuple)):
            if has_override(value):
                return True
        elif (
            getattr(kind, "__torch_function__", no_override) is not no_override
            and function_protocol_enabled()
            and not issubclass(kind, torch.nn.Parameter)
        ):
            return True
    return False


def make_transparent(namespace: dict[str, Any]) -> None:
    """Let `run_transparently` work for functions of a namespace until no session is attached."""
    _replace_asks(namespace, PATCHES.add)


def call_transparently(namespace: dict[str, Any], function: Callable[..., R], *args: Any) -> R:
    """Call `function`, and let `run_transparently` work there for functions of a namespace.

    Outside of it Dynamo finds the originals, to which the code that it compiles is bound.
    """
    # Wrappers call those of this namespace.
    own = _Transparent.of(namespace), _Transparent.of(vars(torch.nn.functional))
    user = object()
    try:
        for patches in own:
            patches.acquire(user)
        result = function(*args)
        for patches in own:
            patches.release(user)
        return result
    except BaseException:
        for patches in own:
            patches.release(user)
        raise


class _Transparent(Patches):
    """The replacements in one namespace."""

    _known: dict[int, _Transparent] = {}  # noqa: RUF012

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self._namespace = namespace

    @classmethod
    def of(cls, namespace: dict[str, Any]) -> _Transparent:
        return cls._known.setdefault(id(namespace), cls(namespace))

    def install(self) -> None:
        _replace_asks(self._namespace, self.replace)


def _replace_asks(
    namespace: dict[str, Any], replace: Callable[[_Namespace, str, Any], None]
) -> None:
    for name, asks in _ASKS.items():
        original = namespace.get(name)
        if original is not None and not hasattr(original, _MARK):
            replacement = asks(original)
            setattr(replacement, _MARK, True)
            replace(_Namespace(namespace), name, replacement)


_MARK = "__amanda_transparent__"


class _Namespace:
    """A namespace as an object whose attributes can be replaced."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.__dict__ = namespace


# The three functions differ in their arguments: one iterable, one value, any number.


def _types_only() -> bool:
    """Return True if no mode except the interceptor's could be asked in this thread."""
    if STATE.transparent:
        return True
    return (
        STATE.mode is not None and function_mode_count() == 1 and function_mode_at(0) is STATE.mode
    )


def _one_iterable(original: Callable[..., bool]) -> Callable[..., bool]:
    def has_torch_function(relevant_args: Any) -> bool:
        return has_override(relevant_args) if _types_only() else original(relevant_args)

    return has_torch_function


def _one_value(original: Callable[..., bool]) -> Callable[..., bool]:
    def has_torch_function_unary(obj: Any) -> bool:
        return has_override((obj,)) if _types_only() else original(obj)

    return has_torch_function_unary


def _any_number(original: Callable[..., bool]) -> Callable[..., bool]:
    def has_torch_function_variadic(*args: Any) -> bool:
        return has_override(args) if _types_only() else original(*args)

    return has_torch_function_variadic


_ASKS = {
    "has_torch_function": _one_iterable,
    "has_torch_function_unary": _one_value,
    "has_torch_function_variadic": _any_number,
}
