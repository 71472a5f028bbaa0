"""Functions of torch that are replaced while any session is attached.

Owns the entry points that interceptors of operators do not see: modules, functions written in
Python, the backward engine, checkpointing, printing, compiled callables, optimizers. Each
replacement acts only in instrumented threads, and calls the original elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amanda_core.imports import ImportWatcher
from amanda_core.patching import Patches
from amanda_core.weights.state import forget_all_edited
from amanda_driver_torch import extensions
from amanda_driver_torch._autograd import function_apply
from amanda_driver_torch._entry import device_graphs, swap_tensors
from amanda_driver_torch._entry.checkpoint import Rerun, watch_first_run
from amanda_driver_torch._execution.pending_hooks import hook_at_once
from amanda_driver_torch._identity.rules import BOUNDARY
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.extension import hastened, native
from amanda_driver_torch._torch.internals import (
    CHECKPOINT_FIRST_RUNS,
    CHECKPOINT_FUNCTIONS,
    COMPILED_FRAMES,
    DYNAMO_EXPORT,
    ENGINE,
    GRADIENT_SEEDS,
    HOOK_REGISTRATION,
    SCRIPT_TRACING,
    SYMBOLIC_TRACING,
    TENSOR_PRINTING,
    TRACED_MODULES,
    VERSION_RESET,
    HigherOrderOperator,
    Named,
    ScriptFunction,
    ScriptMethod,
    compiles_backward,
    count_frame,
    function_mode_at,
    function_mode_count,
    only_exports,
    runs_higher_order,
    without_innermost_mode,
)

__all__ = ["PATCHES"]


class _Patches(Patches):
    """All replacements, installed for the first session and undone after the last."""

    def add(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace one more attribute while any session is attached."""
        with self.lock:
            self.replace(owner, name, replacement)

    def add_operator(self, owner: Any, name: str, op_type: str) -> None:
        """Treat calls of ``owner.name`` as an operator while any session is attached."""
        with self.lock:
            original = getattr(owner, name, None)
            if original is not None and not hasattr(original, _OPERATOR):
                self.replace(owner, name, _operator_call(original, op_type))

    def install(self) -> None:
        self.replace(nn.Module, "__call__", _module_call(nn.Module.__call__))
        self.afterwards(function_apply.replace())
        self.afterwards(swap_tensors.replace())
        self.afterwards(device_graphs.replace())
        self._patch_engine()
        if native is not None and hasattr(*HOOK_REGISTRATION):
            quick = native.registration(getattr(*HOOK_REGISTRATION), RemovableHandle)
            self.replace(*HOOK_REGISTRATION, quick)
        quiet = _quiet if native is None else native.quiet  # It runs in each backward pass.
        self.replace(*GRADIENT_SEEDS, quiet(getattr(*GRADIENT_SEEDS)))
        if hasattr(*VERSION_RESET):
            self.replace(*VERSION_RESET, _forgetting(getattr(*VERSION_RESET)))
        self._patch_optimizers()
        self._patch_scripts()
        for owner, name, op_type in extensions.registered():
            self.add_operator(owner, name, op_type)
        call = _higher_order_call(HigherOrderOperator.__call__)
        self.replace(HigherOrderOperator, "__call__", call)
        late = {
            TENSOR_PRINTING.module: self._patch_printing,
            SCRIPT_TRACING.module: self._patch_tracing,
            SYMBOLIC_TRACING.module: self._patch_symbolic_tracing,
            "torch.utils.checkpoint": self._patch_checkpoint,
            COMPILED_FRAMES.module: self._patch_dynamo,
            TRACED_MODULES.module: self._patch_traced_modules,
            DYNAMO_EXPORT[0]: self._patch_dynamo_export,
        }
        waiting = [name for name in late if name not in sys.modules]
        for name, install in late.items():
            if name not in waiting:
                install()
        if waiting:
            watcher = ImportWatcher(waiting, lambda name: late[name]())
            watcher.start()
            self.afterwards(watcher.stop)

    def _patch_engine(self) -> None:
        self.replace(*ENGINE, _Engine(getattr(*ENGINE)))

    def _patch_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.afterwards(register_optimizer_step_post_hook(_step_ended).remove)

    def _patch_scripts(self) -> None:
        for kind in (ScriptFunction, ScriptMethod):
            self.replace(kind, "__call__", _script_call(kind.__call__))

    def _patch_printing(self) -> None:
        self._silence(TENSOR_PRINTING)

    def _patch_tracing(self) -> None:
        self._silence(SCRIPT_TRACING)

    def _silence(self, functions: Named) -> None:
        module = sys.modules[functions.module]
        for name in functions.names:
            self.replace(module, name, _quiet(getattr(module, name)))

    def _patch_symbolic_tracing(self) -> None:
        # Tensors that it makes of constants are not executions either.
        tracer = sys.modules[SYMBOLIC_TRACING.module].Tracer
        self.replace(tracer, "trace", _quiet(tracer.trace))

    def _patch_checkpoint(self) -> None:
        module = sys.modules["torch.utils.checkpoint"]
        # Call sites of a first run end at `checkpoint`, as those of a rerun end at `Rerun`.
        for name in CHECKPOINT_FUNCTIONS:
            if hasattr(module, name):
                code = getattr(module, name).__code__
                BOUNDARY[id(code)] = code
                self.afterwards(functools.partial(BOUNDARY.pop, id(code)))
        reentrant = module.CheckpointFunction
        forward = vars(reentrant)["forward"].__func__

        def run_first(ctx: Any, run_function: Any, *args: Any) -> Any:
            return forward(ctx, Rerun(run_function, first=True), *args)

        self.replace(reentrant, "forward", staticmethod(run_first))
        name = next(name for name in CHECKPOINT_FIRST_RUNS if hasattr(module, name))
        self.replace(module, name, watch_first_run(getattr(module, name)))

    def _patch_dynamo(self) -> None:
        module = sys.modules[COMPILED_FRAMES.module]
        original = getattr(module, COMPILED_FRAMES.callback)
        set_count = getattr(module, COMPILED_FRAMES.frame_count, None)
        set_region = getattr(module, COMPILED_FRAMES.region, None)

        def choose(callback: Any) -> Any:
            attachment = STATE.attachment
            if attachment is None or callback in (None, False):
                return original(callback)
            wrapper = sys._getframe(1)
            if only_exports(callback) or runs_higher_order(wrapper):
                return original(_beneath_mode(callback))
            if not _is_seen(attachment):
                return original(callback)
            reason = attachment.why_eager()
            if not reason:
                chosen = original(callback)  # The user's stance may forbid it.
                found = attachment.compiled_callback(chosen)
                # What analyses backward operators depends on whether gradients are recorded.
                if found and chosen is callback and not attachment.session.wants_backward:
                    attachment.watch.keep_callback(callback, found, found.backend.region)
                if found is not None or chosen in (None, False):
                    return found
                reason = "its compiler is not known"
            STATE.not_compiled[id(wrapper.f_code)] = wrapper.f_code
            count_frame(set_count)
            attachment.session.warn_once(
                "Compiled callables run eagerly while tools are applied, so that their operators "
                f"can be seen: {reason}."
            )
            return None

        if native is not None:
            choose = native.chooser(original, choose, set_region)
        self.replace(module, COMPILED_FRAMES.callback, choose)

    def _patch_traced_modules(self) -> None:
        module, name = sys.modules[TRACED_MODULES.module], TRACED_MODULES.names[0]
        call = nn.Module.__call__
        original = call.__wrapped__  # type: ignore[attr-defined]
        if getattr(module, name, None) is call:
            setattr(module, name, original)  # It was imported after the replacement.
        if getattr(module, name, None) is original:
            # Dynamo traces only the `forward` of modules whose call is this one, as without tools.
            self.replace(module, name, call)

    def _patch_dynamo_export(self) -> None:
        module, name = sys.modules[DYNAMO_EXPORT[0]], DYNAMO_EXPORT[1]
        self.replace(module, name, _quiet_export(getattr(module, name)))


PATCHES = _Patches()


# Modules.


def _module_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # First, so that Dynamo evaluates it while tracing and only traces the original.
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        attachment = STATE.attachment
        if attachment is None or STATE.quiet or not attachment.session.enabled:
            return original(module, *args, **kwargs)
        return attachment.call_module(module, original, args, kwargs)

    BOUNDARY[id(call.__code__)] = call.__code__
    # `inspect.signature` of a model must be that of the original.
    replacement = functools.wraps(original)(call)
    if native is not None:
        # `module(...)` calls C code. Everything else sees and calls this function.
        native.hasten_module_call(replacement, original)
    return replacement


# The backward engine.


class _Engine:
    """Wraps torch's engine, as operators in a backward pass are not part of the user's program."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        if native is not None:
            in_python = self.run_backward
            run = native.engine(engine.run_backward, in_python, compiles_backward)
            self.run_backward = run  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if compiles_backward():
            roots = args[0] if args else kwargs["tensors"]
            if attachment is None:
                hook_at_once(roots)
            else:
                attachment.attempt("compiled backward passes", None, hook_at_once, roots)
        if attachment is None:
            return self._engine.run_backward(*args, **kwargs)
        # tensors, grad_tensors, keep_graph, create_graph, ...
        if args[3] if len(args) > 3 else kwargs.get("create_graph", False):
            attachment.watch_second_order()
        STATE.backward += 1
        STATE.opaque += 1
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            STATE.opaque -= 1
            STATE.backward -= 1


def _quiet(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        STATE.quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            STATE.quiet -= 1

    return call


def _forgetting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            # The versions do not tell of the writes before.
            forget_all_edited()

    return call


# Compiled callables.


def _quiet_export(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:
        result = _quiet(original)(*args, **kwargs)
        # Without inputs, it returns the function that takes them.
        return _quiet(result) if callable(result) else result

    return export


def _beneath_mode(callback: Any) -> Any:
    """Let Dynamo trace without the function-mode interceptor, if it is the innermost mode."""
    top = function_mode_count() - 1
    if STATE.mode is None or top < 0 or function_mode_at(top) is not STATE.mode:
        return callback

    @functools.wraps(callback)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_innermost_mode():
            return callback(*args, **kwargs)

    return call


def _is_seen(attachment: Any) -> bool:
    """Return True if the code of a compiled callable that is called now is not its own."""
    if attachment.watching():
        return True
    # Dynamo cannot trace through the function-mode interceptor, even if it is idle.
    stack = range(function_mode_count() if STATE.mode is not None else 0)
    return any(function_mode_at(i) is STATE.mode for i in stack)


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
    return hastened(call)


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
        # Ops called while it compiles or traces do not belong to the model.
        run = functools.partial(_quiet(original), operator)
        return attachment.execute_python(operator, operator.__name__, run, args, kwargs)

    return hastened(call)


# Optimizers.


def _step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    attachment = STATE.attachment
    if attachment is not None:
        attachment.attempt("the end of a step", None, attachment.session.end_step)
