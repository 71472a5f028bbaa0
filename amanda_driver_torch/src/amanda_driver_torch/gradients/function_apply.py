"""Replaces `autograd.Function.apply` while any session is attached.

Owns what is done about torch's two forms of it. The code of a Python function is exchanged. The
extension redirects a class method in C, or without the extension an attribute shadows it.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import Function

from amanda_core.driver_kit import Patches
from amanda_driver_torch.operators.operator import Args, Kwargs
from amanda_driver_torch.threads.state import STATE, call_quietly
from amanda_driver_torch.torch_internals.entry_points import PARTS_OF_OTHERS
from amanda_driver_torch.torch_internals.extension import hastened, native
from amanda_driver_torch.torch_internals.internals import (
    APPLY,
    APPLY_IS_PYTHON,
    BackwardHookFunction,
)

__all__ = ["apply_function", "apply_unseen", "frame_of_apply", "replace"]

#: Names of the instruction that calls a function in the versions of Python.
_CALLS = frozenset({"CALL", "CALL_FUNCTION"})
_original: Callable[..., Any] | None = None
_redirected = False


def replace(patches: Patches) -> None:
    """Replace `Function.apply` by `apply_function` until the patches are undone."""
    global _original, _redirected
    if APPLY_IS_PYTHON:
        function = APPLY.__func__
        code = function.__code__

        def undo() -> None:
            hastened(function, False)
            vars(function).pop("__wrapped__", None)
            function.__code__ = code

        patches.afterwards(undo)
        _original = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        # The code and not the attribute, so that earlier references (`f = MyFunction.apply`)
        # run it, too.
        function.__code__ = _Carrier.apply.__code__
        function.__wrapped__ = _original
        hastened(function)
        return
    if native is not None:
        folder = str(Path(torch.__file__).parent)
        patches.afterwards(native.restore_class_method)
        if native.redirect_class_method(APPLY, apply_function, folder) is None:
            _original, _redirected = native.call_class_method, True
            return
    _original = _call_class_method
    patches.replace(Function, "apply", classmethod(_apply))


def apply_function(cls: type[Function], args: Args, kwargs: Kwargs | None) -> Any:
    """Run `cls.apply`, as an operator if it is one."""
    original, kwargs = _original, kwargs or {}
    assert original is not None
    attachment = STATE.attachment
    if attachment is None or not attachment.watching():
        return original(cls, *args, **kwargs)
    if cls.__module__ in PARTS_OF_OTHERS:
        return original(cls, *args, **kwargs)
    if cls is BackwardHookFunction:
        # It carries a module's full backward hooks and does not belong to the model. torch looks
        # for this very node on the outputs.
        return call_quietly(original, cls, *args, **kwargs)

    call = functools.partial(original, cls)
    return attachment.execute_python(cls, cls.__name__, call, args, kwargs)


def frame_of_apply() -> tuple[types.CodeType, dict[str, Any], int] | None:
    """Return the frame in which an `autograd.Function` is an operator: code, globals, instruction.

    Returns:
        None if torch's function is in C.
    """
    if not APPLY_IS_PYTHON:
        return None
    function = APPLY.__func__
    (call,) = (one.offset for one in dis.get_instructions(_Carrier.apply) if one.opname in _CALLS)
    return function.__code__, function.__globals__, call


def apply_unseen(function: type[Function], *args: Any) -> Any:
    """Run `function.apply` for a function of the driver itself, which is not an operator."""
    if _redirected:
        return native.call_class_method(function, *args)
    # One in Python is itself over this class method in C (3.3 against 2.2 us).
    return super(Function, function).apply(*args)  # type: ignore[misc]


class _Carrier:
    # Only its code is used. It runs with the globals of torch.autograd.function, so it imports what
    # it needs, and it must have the cell `__class__` like the original.
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        from amanda_driver_torch.gradients.function_apply import apply_function

        __class__  # type: ignore[name-defined]  # noqa: B018
        return apply_function(cls, args, kwargs)  # type: ignore[arg-type]


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    return apply_function(cls, args, kwargs)


def _call_class_method(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    return APPLY.__get__(None, cls)(*args, **kwargs)
