"""Functions of torch that are replaced while any session is attached.

Owns the entry points that interceptors of operators do not see: modules, functions written in
Python, the backward engine, checkpointing, printing, compiled callables, optimizers. Each
replacement acts only in instrumented threads, and calls the original elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amanda_core.driver_kit import ImportWatcher, Patches, made_once
from amanda_driver_torch import extensions
from amanda_driver_torch.execution.pending_hooks import hook_at_once
from amanda_driver_torch.execution.reductions import REDUCE_GRAD
from amanda_driver_torch.gradients import function_apply
from amanda_driver_torch.identity.frames import BOUNDARY
from amanda_driver_torch.interception import (
    collectives,
    device_graphs,
    fused_inference,
    pipelines,
    swap_tensors,
    zone_calls,
)
from amanda_driver_torch.interception.checkpoint import Rerun, watch_first_run
from amanda_driver_torch.interception.joining import joins
from amanda_driver_torch.interception.serialization import WRITING, quiet_export, quietly_called
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.distributed import STAGES
from amanda_driver_torch.torch_internals.entry_points import (
    CHECKPOINT_FIRST_RUNS,
    CHECKPOINT_FUNCTIONS,
    COMPILED_FRAMES,
    DYNAMO_EXPORT,
    ENGINE,
    FUSED_PATH,
    GRADIENT_SEEDS,
    HOOK_REGISTRATION,
    TRACED_MODULES,
    VERSION_RESET,
    compiled_by,
    count_frame,
    dynamo_rules,
    only_exports,
    runs_higher_order,
)
from amanda_driver_torch.torch_internals.extension import hastened, native
from amanda_driver_torch.torch_internals.internals import (
    HigherOrderOperator,
    ScriptFunction,
    ScriptMethod,
    compiles_backward,
    function_mode_at,
    function_mode_count,
    without_innermost_mode,
)

__all__ = ["PATCHES", "as_operators"]


# Modules that `import torch` does not load.


def _in_checkpoint() -> Iterator[tuple[Any, str, Any]]:
    module = sys.modules["torch.utils.checkpoint"]
    # Call sites of a first run end at `checkpoint`, as those of a rerun end at `Rerun`.
    for name in CHECKPOINT_FUNCTIONS:
        if hasattr(module, name):
            code = getattr(module, name).__code__
            BOUNDARY[id(code)] = code
    reentrant = module.CheckpointFunction
    forward = vars(reentrant)["forward"].__func__

    def run_first(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, Rerun(run_function, first=True), *args)

    yield reentrant, "forward", staticmethod(run_first)
    names = [name for name in CHECKPOINT_FIRST_RUNS if hasattr(module, name)]
    name = (names or CHECKPOINT_FIRST_RUNS)[0]
    yield module, name, watch_first_run(getattr(module, name))


def _in_traced_modules() -> Iterator[tuple[Any, str, Any]]:
    module, name = sys.modules[TRACED_MODULES[0]], TRACED_MODULES[1]
    call: Any = nn.Module.__call__
    original = call
    if id(getattr(call, "__code__", None)) in BOUNDARY:  # It is the replacement.
        original = call.__wrapped__
        if getattr(module, name, None) is call:
            setattr(module, name, original)  # It was imported after the replacement.
    if getattr(module, name, None) is original:
        # Dynamo traces only the `forward` of modules whose call is this one, as without tools.
        yield module, name, _module_call(original)


def _in_export() -> Iterator[tuple[Any, str, Any]]:
    module, name = sys.modules[DYNAMO_EXPORT[0]], DYNAMO_EXPORT[1]
    yield module, name, quiet_export(getattr(module, name))


class _FunctionsOf:
    """A class whose functions are replaced as attributes of this object.

    torch has hundreds of subclasses of `nn.Module`. Setting ``__call__`` in the usual way would
    take a fifth of the time of entering `apply`, since Python goes through all of them.
    """

    def __init__(self, owner: type) -> None:
        super().__setattr__("owner", owner)

    def __getattribute__(self, name: str) -> Any:
        owner = super().__getattribute__("owner")
        return vars(owner) if name == "__dict__" else getattr(owner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = super().__getattribute__("owner")
        (setattr if native is None else native.replace_function)(owner, name, value)


class _Patches(Patches):
    """All replacements, installed for the first session and undone after the last."""

    def __init__(self) -> None:
        super().__init__()
        #: Dynamo's rules in which the originals are.
        self._rules: dict[Any, Any] = {}
        #: Module -> yields what to replace in it once it is imported.
        self._late: dict[str, Callable[[], Iterator[tuple[Any, str, Any]]]] = {
            "torch.utils.checkpoint": _in_checkpoint,
            COMPILED_FRAMES.module: self._in_dynamo,
            TRACED_MODULES[0]: _in_traced_modules,
            DYNAMO_EXPORT[0]: _in_export,
            STAGES[0]: pipelines.found,
        }

    def _name_originals(self, rules: dict[Any, Any]) -> None:
        """Put the originals among Dynamo's rules, which it makes once, of what has a name then."""
        if rules is self._rules or not rules:
            return
        for replacement, original in self.replaced():
            if isinstance(replacement, Hashable) and replacement in rules:
                rules[original] = rules.pop(replacement)
        self._rules = rules

    def restore(self) -> None:
        self._name_originals(dynamo_rules(listed=False))
        super().restore()

    def add(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace one more attribute while any session is attached."""
        with self.lock:
            self.replace(owner, name, replacement)

    def add_found(
        self, find: Callable[..., Iterable[tuple[Any, str, Any]]], *arguments: Any
    ) -> None:
        """Replace the attributes that a function finds while any session is attached."""
        with self.lock:
            self.replace_found(find, *arguments)

    def install(self) -> None:
        function_apply.replace(self)
        swap_tensors.replace(self.afterwards)
        self.afterwards(device_graphs.end_all)
        if native is not None:
            self.afterwards(functools.partial(native.set_ask, None))
            self.afterwards(functools.partial(native.share, False))
        zone_calls.hook_steps(self)
        WRITING.replace(self)
        waiting = [name for name in self._late if name not in sys.modules]
        late = [name for name in self._late if name not in waiting]
        self.replace_found(self._find, late)
        self.replace_found(as_operators, *extensions.registered())
        if waiting:
            watcher = ImportWatcher(waiting, self._imported)
            self.afterwards(watcher.stop)
            watcher.start()

    def _imported(self, module: str) -> None:
        for owner, name, replacement in self._late[module]():
            self.replace(owner, name, replacement)

    def _find(self, late: Sequence[str]) -> Iterator[tuple[Any, str, Any]]:
        """Yield the owner, the name and the replacement of each attribute.

        Args:
            late: Those of the late modules that are imported.
        """
        replacement = _module_call(nn.Module.__call__)
        if native is not None:
            # `module(...)` calls C code. Everything else sees and calls this function.
            native.hasten_module_call(replacement, nn.Module.__call__)
        yield _FunctionsOf(nn.Module), "__call__", replacement
        yield from device_graphs.found()
        yield from collectives.found()
        yield *ENGINE, _Engine(getattr(*ENGINE))
        if hasattr(*FUSED_PATH):
            yield *FUSED_PATH, fused_inference.replacement(getattr(*FUSED_PATH))
        if native is not None and hasattr(*HOOK_REGISTRATION):
            quick = native.registration(getattr(*HOOK_REGISTRATION), RemovableHandle)
            yield *HOOK_REGISTRATION, quick
        seeds = quietly_called if native is None else native.quiet  # It runs in each backward pass.
        yield *GRADIENT_SEEDS, seeds(getattr(*GRADIENT_SEEDS))
        if hasattr(*VERSION_RESET):
            yield *VERSION_RESET, collectives.forgetting(getattr(*VERSION_RESET))
        yield from zone_calls.found()
        for kind in (ScriptFunction, ScriptMethod):
            yield kind, "__call__", _script_call(kind.__call__)
        call = _higher_order_call(HigherOrderOperator.__call__)
        yield HigherOrderOperator, "__call__", call
        for module in late:
            yield from self._late[module]()

    def _in_dynamo(self) -> Iterator[tuple[Any, str, Any]]:
        module = sys.modules[COMPILED_FRAMES.module]
        original = getattr(module, COMPILED_FRAMES.callback)
        set_count = getattr(module, COMPILED_FRAMES.frame_count, None)
        set_region = getattr(module, COMPILED_FRAMES.region, None)

        def choose(callback: Any) -> Any:
            attachment = STATE.attachment
            if attachment is None or callback in (None, False):
                return original(callback)
            self._name_originals(dynamo_rules(listed=True))
            wrapper = sys._getframe(1)
            if only_exports(callback) or runs_higher_order(wrapper):
                return original(_beneath_mode(callback))
            if not _is_seen(attachment):
                return original(callback)
            reason = attachment.why_eager(compiled_by(wrapper))
            if not reason:
                chosen = original(callback)  # The user's stance may forbid it.
                found = attachment.compiled_callback(chosen)
                if found and chosen is callback:
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
        yield module, COMPILED_FRAMES.callback, choose


PATCHES = _Patches()


# Modules.


@made_once
def _module_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # First, so that Dynamo evaluates it while tracing and only traces the original.
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        attachment = STATE.attachment
        if (attachment is None or attachment.session.closed) and joins(type(module).__name__):
            attachment = STATE.attachment
        if attachment is None or STATE.quiet or not attachment.session.enabled:
            return original(module, *args, **kwargs)
        return attachment.call_module(module, original, args, kwargs)

    BOUNDARY[id(call.__code__)] = call.__code__
    # `inspect.signature` of a model must be that of the original.
    return functools.wraps(original)(call)


# The backward engine.


class _Engine:
    """Wraps torch's engine, as operators in a backward pass are not part of the user's program."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        if native is not None:
            in_python = self.run_backward
            run = native.engine(engine.run_backward, in_python, _runs_in_python)
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
        before = STATE.backward, STATE.opaque
        is_reduced = not before[0] and attachment.reductions.wanted()
        try:
            if is_reduced:
                attachment.attempt(REDUCE_GRAD, None, attachment.reductions.begin)
            STATE.backward, STATE.opaque = before[0] + 1, before[1] + 1
            result = self._engine.run_backward(*args, **kwargs)
            STATE.backward, STATE.opaque = before
            if is_reduced and STATE.attachment is attachment:
                attachment.attempt(REDUCE_GRAD, None, attachment.reductions.end)
            return result
        except BaseException:
            STATE.backward, STATE.opaque = before
            raise


def _runs_in_python() -> bool:
    """Return True if the extension must not run a backward pass itself."""
    attachment = STATE.attachment
    if attachment is None or compiles_backward():
        return compiles_backward()
    reductions = attachment.reductions
    # A pass inside another one is not counted.
    return not (STATE.backward == 0 and reductions.skips()) and reductions.wanted()


# Compiled callables.


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


def as_operators(*functions: tuple[Any, str, str]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace so that calls of functions are operators: owner, name, replacement.

    Args:
        *functions: The owner and the name of each, and the type of its operator.
    """
    for owner, name, op_type in functions:
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, _OPERATOR):
            yield owner, name, _operator_call(original, op_type)


def _operator_call(original: Callable[..., Any], op_type: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if attachment is None or not attachment.watching():
            return original(*args, **kwargs)
        return attachment.execute_python(original, op_type, original, args, kwargs)

    functools.update_wrapper(call, original)
    setattr(call, _OPERATOR, True)
    return hastened(call)


@made_once
def _script_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if attachment is None or not attachment.watching():
            return original(script, *args, **kwargs)
        run = functools.partial(original, script)
        name = str(getattr(script, "name", None) or type(script).__name__)
        return attachment.execute_python(script, name, run, args, kwargs)

    return call


@made_once
def _higher_order_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if attachment is None or not attachment.watching():
            return original(operator, *args, **kwargs)
        attachment.session.note_inside(operator.__name__, "a higher-order operator")
        # Ops called while it compiles or traces do not belong to the model.
        run = functools.partial(quietly_called(original), operator)
        return attachment.execute_python(operator, operator.__name__, run, args, kwargs)

    return hastened(call)
