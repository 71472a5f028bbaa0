"""What is replaced in torch while some session is attached, and put back when none is.

Owns the entry points that no interceptor of operators sees: modules, functions written in Python,
the backward engine, checkpointing, printing, compiled callables, optimizers. Each replacement acts
only in threads that a session watches, and calls the original elsewhere.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.variable import Variable
from torch.nn.modules._functions import BackwardHookFunction

from amanda_core.imports import ImportWatcher
from amanda_core.patching import Patches
from amanda_driver_torch import extensions
from amanda_driver_torch._build import native
from amanda_driver_torch._checkpoint import Rerun, watch_first_run
from amanda_driver_torch._frames import user_stacklevel
from amanda_driver_torch._sites import BOUNDARY
from amanda_driver_torch._state import STATE, opaquely, quietly

__all__ = ["PATCHES"]


class _CodePatch:
    """The code of a function: also what was bound before (`f = MyFunction.apply`) runs it."""

    def __init__(self, function: types.FunctionType, code: types.CodeType) -> None:
        self._function, self._original = function, function.__code__
        function.__code__ = code

    def undo(self) -> None:
        self._function.__code__ = self._original


class _Patches(Patches):
    """All replacements, installed for the first session and undone after the last."""

    def add(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace one more attribute, while some session is attached."""
        with self._lock:
            self._replace(owner, name, replacement)

    def add_operator(self, owner: Any, name: str, op_type: str) -> None:
        """Let calls of ``owner.name`` be an operator, while some session is attached."""
        with self._lock:
            original = getattr(owner, name, None)
            if original is not None and not hasattr(original, _OPERATOR):
                self._replace(owner, name, _operator_call(original, op_type))

    def _install(self) -> None:
        self._replace(nn.Module, "__call__", _module_call(nn.Module.__call__))
        self._patch_function_apply()
        self._patch_engine()
        self._replace(torch.autograd, "_make_grads", _quiet(torch.autograd._make_grads))
        self._patch_optimizers()
        self._patch_scripts()
        for owner, name, op_type in extensions.registered():
            self.add_operator(owner, name, op_type)
        hop = torch._ops.HigherOrderOperator
        self._replace(hop, "__call__", _higher_order_call(hop.__call__))
        late = {
            "torch._tensor_str": self._patch_printing,
            "torch.jit._trace": self._patch_tracing,
            "torch.utils.checkpoint": self._patch_checkpoint,
            "torch._dynamo.eval_frame": self._patch_dynamo,
        }
        waiting = [name for name in late if name not in sys.modules]
        for name, install in late.items():
            if name not in waiting:
                install()
        if waiting:
            watcher = ImportWatcher(waiting, lambda name: late[name]())
            watcher.start()
            self._afterwards(watcher.stop)

    def _patch_function_apply(self) -> None:
        function = Function.__dict__["apply"].__func__
        original = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        _ORIGINALS["Function.apply"] = original
        code = _Carrier.apply.__code__
        self._afterwards(_CodePatch(function, code).undo)

    def _patch_engine(self) -> None:
        self._replace(Variable, "_execution_engine", _Engine(Variable._execution_engine))

    def _patch_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._afterwards(register_optimizer_step_post_hook(_step_ended).remove)

    def _patch_scripts(self) -> None:
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            self._replace(kind, "__call__", _script_call(kind.__call__))

    def _patch_printing(self) -> None:
        module = sys.modules["torch._tensor_str"]
        self._replace(module, "_str", _quiet(module._str))

    def _patch_tracing(self) -> None:
        # It runs the model three times, and compares the runs.
        module = sys.modules["torch.jit._trace"]
        for name in ("_trace_impl", "trace_module"):
            self._replace(module, name, _quiet(getattr(module, name)))

    def _patch_checkpoint(self) -> None:
        module = sys.modules["torch.utils.checkpoint"]
        # Whatever is inside a first run ends at `checkpoint`, as a rerun ends at `Rerun`.
        code = module.checkpoint.__code__
        BOUNDARY.add(code)
        self._afterwards(lambda: BOUNDARY.discard(code))
        reentrant = module.CheckpointFunction
        forward = vars(reentrant)["forward"].__func__

        def run_first(ctx: Any, run_function: Any, *args: Any) -> Any:
            return forward(ctx, Rerun(run_function, first=True), *args)

        self._replace(reentrant, "forward", staticmethod(run_first))
        name = "_checkpoint_without_reentrant_generator"
        self._replace(module, name, watch_first_run(getattr(module, name)))

    def _patch_dynamo(self) -> None:
        module = sys.modules["torch._dynamo.eval_frame"]
        original = module._callback_from_stance

        def run_eagerly(callback: Any) -> Any:
            attachment = STATE.attachment
            if attachment is None or callback in (None, False) or not attachment.watching():
                return original(callback)
            attachment.session.warn_once(
                "Compiled callables run eagerly while tools are applied, so that their operators "
                "can be seen.",
                user_stacklevel(),
            )
            return None

        self._replace(module, "_callback_from_stance", run_eagerly)


PATCHES = _Patches()
_ORIGINALS: dict[str, Any] = {}


# Modules.


def _module_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # First, so that Dynamo folds it and traces the original.
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        attachment = STATE.attachment
        if attachment is None or STATE.quiet or not attachment.session.enabled:
            return original(module, *args, **kwargs)
        return attachment.call_module(module, original, args, kwargs)

    BOUNDARY.add(call.__code__)
    # What looks at a model's signature sees the original's.
    replacement = functools.wraps(original)(call)
    if native is not None:
        # A function for all who look at it, or call it by name; `module(...)` goes by C.
        native.hasten_module_call(replacement, original)
    return replacement


# autograd.Function.


class _Carrier:
    # Only its code is used. It needs the cell `__class__` that the original has, and finds the
    # rest by import, because it runs with the globals of torch.autograd.function.
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        from amanda_driver_torch._patches import apply_function

        __class__  # type: ignore[name-defined]  # noqa: B018
        return apply_function(cls, args, kwargs)  # type: ignore[arg-type]


def apply_function(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Function.apply` while some session is attached."""
    original = _ORIGINALS["Function.apply"]
    attachment = STATE.attachment
    if attachment is None or not attachment.watching():
        return original(cls, *args, **kwargs)
    if cls.__module__ == "torch.utils.checkpoint":
        # A container: its content is seen by itself.
        return original(cls, *args, **kwargs)
    if cls is BackwardHookFunction:
        # The place of a module's full backward hooks, no part of the model: torch looks for this
        # very node on what it returned.
        with quietly():
            return original(cls, *args, **kwargs)

    call = functools.partial(original, cls)
    return attachment.execute_python(cls, cls.__name__, call, args, kwargs)


# The backward engine.


class _Engine:
    """Stands before torch's engine: operators in a backward pass are not the user's program."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if attachment is None:
            return self._engine.run_backward(*args, **kwargs)
        # tensors, grad_tensors, keep_graph, create_graph, ...
        if args[3] if len(args) > 3 else kwargs.get("create_graph", False):
            attachment.watch_second_order()
        STATE.backward += 1
        try:
            with opaquely():
                return self._engine.run_backward(*args, **kwargs)
        finally:
            STATE.backward -= 1


def _quiet(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with quietly():
            return original(*args, **kwargs)

    return call


# Scripts and higher-order operators.


_OPERATOR = "__amanda_operator__"


def _operator_call(original: Callable[..., Any], op_type: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if attachment is None or not attachment.watching():
            return original(*args, **kwargs)
        return attachment.execute_python(original, op_type, original, args, kwargs)

    functools.update_wrapper(call, original)
    setattr(call, _OPERATOR, True)
    return call


def _script_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if attachment is None or not attachment.watching():
            return original(script, *args, **kwargs)
        run = functools.partial(original, script)
        name = str(getattr(script, "name", None) or type(script).__name__)
        return attachment.execute_python(script, name, run, args, kwargs)

    return call


def _higher_order_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if attachment is None or not attachment.watching():
            return original(operator, *args, **kwargs)
        # What it compiles or traces inside calls operators of its own.
        run = functools.partial(_quiet(original), operator)
        return attachment.execute_python(operator, operator.__name__, run, args, kwargs)

    return call


# Optimizers.


def _step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    attachment = STATE.attachment
    if attachment is not None:
        attachment.session.end_step()
