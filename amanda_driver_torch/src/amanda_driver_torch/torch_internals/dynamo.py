"""The parts of Dynamo and AOTAutograd on which compiled callables depend.

Owns every private name of torch's compiler but those of its guards, in `dynamo_guards`. Importing
this module imports torch's compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch._dynamo.output_graph
import torch._dynamo.trace_rules
import torch._dynamo.variables.nn_module
from torch._C._dynamo.eval_frame import (
    _FrameAction as FrameAction,
    _FrameExecStrategy as FrameExecStrategy,
)
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.source import ConstantSource, SyntheticLocalSource
from torch._dynamo.types import ConvertFrameReturn as ConvertFrameReturn
from torch._dynamo.variables import higher_order_ops
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import TracingContext
from torch._higher_order_ops.effects import _EffectType
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
    unset_fake_temporarily as unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_unflatten as tree_unflatten,
)

from amanda_driver_torch.torch_internals.dynamo_guards import BOUND, Bound, is_own
from amanda_driver_torch.torch_internals.entry_points import COMPILED_FRAMES
from amanda_driver_torch.torch_internals.extension import native

#: What Dynamo raises for a program that it cannot trace.
NotTraced = TorchDynamoException
_FRAMES: Any = torch._C._dynamo.eval_frame
without_saved_tensors_hooks: Callable[[], contextlib.AbstractContextManager[None]] = (
    runtime_wrappers._disable_saved_tensors_hooks
)
#: Sets the count of compiled frames; None if the version does not count them.
set_frame_count: Callable[[int], int] | None = getattr(_FRAMES, COMPILED_FRAMES.frame_count, None)
#: Sets the region of recompilations of the frames that follow; None if the version has no regions.
set_recompile_region: Callable[[int], int] | None = getattr(_FRAMES, COMPILED_FRAMES.region, None)
_REGIONS: Iterator[int] = getattr(
    torch._dynamo.eval_frame, "_next_isolate_recompiles_id", itertools.count()
)

#: Runs a graph that is a checkpointed function.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
#: Makes a node of a graph that Dynamo traces.
CREATE_PROXY = (torch._dynamo.output_graph.SubgraphTracer, "create_proxy")
#: Traces the call of a module.
MODULE_CALL = (torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable, "call_function")
#: Notes such a call, by another source.
MODULE_NOTE = (torch._dynamo.variables.nn_module, "record_nn_module_stack")
#: Traces a loss that a program makes as a function: its call is not seen as that of a module.
LOSS_MADE = (torch._dynamo.variables.UserDefinedClassVariable, "_call_cross_entropy_loss")
#: Traces the call of a region that a program compiles once (`nested_compile_region`).
REGION = (getattr(higher_order_ops, "InvokeSubgraphHigherOrderVariable", None), "_call_function")
#: Traces the call of an `autograd.Function`, and what a graph calls for it.
FUNCTION_APPLY = (torch._dynamo.variables.AutogradFunctionVariable, "call_apply")
CUSTOM_FUNCTION = autograd_function_apply
#: Functions in graphs that change how later nodes run.
STATE_CHANGES = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
    }
)
#: Another one. An error inside of it would leave it entered.
INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_TRANSFORMS = "torch._functorch", "torch._C._functorch"
_ENTER_AND_LEAVE = (
    ("increment_nesting", "enter_dual_level", "push_dynamic_layer"),
    ("decrement_nesting", "exit_dual_level", "pop_dynamic_layer"),
)
#: Name of the one that registers a hook on a tensor.
TENSOR_HOOK = "register_hook"
#: Higher-order operators that are one operator each, as where they are called eagerly.
HIGHER_ORDER = frozenset({"cond", "flex_attention", "map_impl", "scan", "while_loop"})


def traced_arguments(variables: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the nodes and constants that traced values are; None if one is neither."""
    found = []
    for one in variables:
        if isinstance(one, torch._dynamo.variables.TensorVariable):
            found.append(one.as_proxy().node)
        elif one.is_python_constant():
            found.append(one.as_python_constant())
        else:
            return None
    return tuple(found)


def effectful(library: torch.library.Library, name: str) -> None:
    """Declare that calls of a custom operator are neither dropped nor merged nor reordered."""
    library._register_effectful_op(name, _EffectType.ORDERED)


def is_dynamos(namespace: Mapping[str, Any]) -> bool:
    """Return True if code with these globals is of torch's compiler."""
    return str(namespace.get("__name__", "")).startswith("torch._dynamo")


def is_made_inside(source: Any) -> bool:
    """Return True if the program that is traced makes the parameter with this source."""
    return isinstance(source, SyntheticLocalSource)


def ends_at_break(module: Any) -> bool:
    """Return True if the program goes on in another graph after this one, a `GraphModule`."""
    return bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))


def begins_at_break(code: CodeType) -> bool:
    """Return True if this is the code with which a program goes on after a graph."""
    return code.co_name.startswith("torch_dynamo_resume_in")


def is_of_transforms(namespace: Mapping[str, Any]) -> bool:
    """Return True if code with these globals is of the transforms of `torch.func`."""
    return str(namespace.get("__name__", "")).startswith(_TRANSFORMS)


def transform_levels(function: Any) -> int | None:
    """Return by how many levels of transforms of `torch.func` later nodes are deeper after a call.

    Args:
        function: What a graph calls.

    Returns:
        1, 0 or -1; None if the function does not belong to a transform.
    """
    if not str(getattr(function, "__module__", "")).startswith(_TRANSFORMS):
        return None
    name = str(getattr(function, "__name__", ""))
    enters, leaves = _ENTER_AND_LEAVE
    return any(part in name for part in enters) - any(part in name for part in leaves)


@contextlib.contextmanager
def on_fake_tensors(fake_mode: Any) -> Iterator[None]:
    """Run operators of a graph on its fake tensors, and leave symbols that nothing uses.

    Args:
        fake_mode: Their mode, or None if there are none.
    """
    if fake_mode is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_mode)
        if TracingContext.try_get() is not None:
            # Dynamo gives the backend another mode, and some operators trace by that one.
            stack.enter_context(TracingContext.patch(fake_mode=fake_mode))
        if fake_mode.shape_env is not None:
            stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


def new_recompile_region() -> int:
    """Return the number of a new region, whose code is limited apart from that of others."""
    return next(_REGIONS)


class _Entry:
    """A piece of compiled code, followed by those of the same backend only."""

    def __init__(self, entry: Any, following: _Entry | None) -> None:
        self._entry, self.next = entry, following

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


def compile_apart(
    callback: Any, frame: Any, entry: Any, state: Any, scope: int, is_region: bool = False
) -> ConvertFrameReturn:
    """Compile a frame by a callback with a backend of its own; other code does not count for it.

    Args:
        callback: The callback.
        frame: The frame.
        entry: The first piece of code that was compiled for it.
        state: What Dynamo knows of the frame.
        scope: The number of the scope in which the frame runs.
        is_region: Whether other modules may share the code, for which the backend asks.
    """
    if set_recompile_region is None:  # Otherwise Dynamo counts by region.
        backend, own = callback._torchdynamo_orig_backend._torchdynamo_orig_backend, None
        while entry is not None:
            if entry.backend is backend:
                own = _Entry(entry, own)
            entry = getattr(entry, "next", None)  # Releases with regions have no chain.
        entry = own
    bound = Bound(frame, scope)
    bound.is_closed = not is_region or set_recompile_region is None
    token = BOUND.set(bound)
    try:
        result: ConvertFrameReturn = callback(frame, entry, state)
    finally:
        BOUND.reset(token)
    if result.guarded_code is not None:
        bound.hold()
        manager: Any = result.guarded_code.guard_manager
        manager.id_matched_objs["___amanda"] = bound
    return result


def is_never_compiled(code: CodeType) -> bool:
    """Return True if Dynamo skips code because of where it stands, with and without tools."""
    return bool(torch._dynamo.trace_rules.check(code))


def hits_limit(result: ConvertFrameReturn) -> bool:
    """Return True if Dynamo compiles no more code for a frame, because a limit is reached."""
    return bool(result.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY)


def hits_total_limit(error: BaseException) -> bool:
    """Return True for a `FailOnRecompileLimitHit` because of `accumulated_recompile_limit`.

    This limit counts the code of all modules to which tools bind it. Dynamo raises the error only
    where it may not run code uncompiled: with ``fullgraph=True`` or `fail_on_recompile_limit_hit`.
    """
    is_limit = isinstance(error, FailOnRecompileLimitHit)
    return is_limit and "accumulated" in f"{error} {error.__cause__}"


def beneath_stance(callback: Any) -> Any:
    """Return the callback that the user's stance wraps, or the same one."""
    inner = getattr(callback, "_torchdynamo_orig_backend", None)
    return inner if isinstance(inner, CatchErrorsWrapper) else callback


def failing(chosen: Any, callback: Any, backend: Any) -> Any:
    """Return a callback that fails where a frame was compiled before, if the stance says so.

    Args:
        chosen: The callback according to the stance.
        callback: The one that compiles.
        backend: Its backend.
    """
    if torch._dynamo.eval_frame._stance.stance != "fail_on_recompile":
        return callback

    def compile_once(frame: Any, entry: Any, state: Any) -> ConvertFrameReturn:
        known = _FRAMES._debug_get_cache_entry_list(frame.f_code)
        is_first = all(one.backend is not backend for one in known)
        result: ConvertFrameReturn = (callback if is_first else chosen)(frame, entry, state)
        return result

    found: Any = compile_once
    found._torchdynamo_orig_backend = callback
    return found


def users_backend(callback: Any) -> Callable[..., Any] | None:
    """Return the backend of a callback of Dynamo; None if it is not of a known kind."""
    convert: Any = getattr(callback, "_torchdynamo_orig_backend", None)
    if not isinstance(callback, CatchErrorsWrapper) or not hasattr(convert, "_clone_with_backend"):
        return None
    found: Callable[..., Any] = convert._torchdynamo_orig_backend
    return found


def backend_itself(backend: Any) -> Any:
    """Return what a backend wraps; Dynamo serves equal ones with the same code."""
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def with_backend(callback: Any, backend: Callable[..., Any], front: Any) -> CatchErrorsWrapper:
    """Return a callback of Dynamo like another one, but with another backend.

    Args:
        callback: The other one.
        backend: The backend.
        front: What Dynamo calls. It finds the backend, and the code compiled by it, through this.
    """
    convert = callback._torchdynamo_orig_backend._clone_with_backend(backend)
    hooks = callback.hooks
    if getattr(hooks, "guard_filter_fn", None) is not None:
        chosen = hooks.guard_filter_fn

        def keep(guards: Any) -> list[bool]:
            return [k or is_own(g) for k, g in zip(chosen(guards), guards, strict=True)]

        hooks = dataclasses.replace(hooks, guard_filter_fn=keep)
    found = CatchErrorsWrapper(convert, hooks)
    front._torchdynamo_orig_backend = found
    return found


def add_buffer(graph: torch.fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Let a graph read a tensor as a buffer, whose values may change."""
    graph.register_buffer(name, tensor)
    sources: Any = getattr(graph, "_param_name_to_source", None)
    if sources is not None:  # AOTAutograd refuses a tensor without one.
        sources[name] = ConstantSource(name)


def with_arguments(
    module: torch.fx.GraphModule, names: Sequence[str]
) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node], list[torch.fx.Node]]:
    """Return a copy of a graph that takes more arguments, as its last ones.

    Dynamo calls compiled code with the arguments of its own graph, so that must stay as it is.

    Returns:
        The copy; node -> the same one in the copy; the arguments.
    """
    graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    result = graph.graph_copy(module.graph, copies)
    graph.output(result)
    for node, copy in copies.items():
        if "_dynamo_source" in vars(node):
            vars(copy)["_dynamo_source"] = vars(node)["_dynamo_source"]
    given = [node for node in graph.nodes if node.op == "placeholder"]
    arguments: list[torch.fx.Node] = []
    for name in names:
        last = [*given, *arguments][-1:]
        with graph.inserting_after(last[0]) if last else graph.inserting_before(None):
            argument = graph.placeholder(name)
        vars(argument)["_dynamo_source"] = ConstantSource(name)  # AOTAutograd refuses one without.
        arguments.append(argument)
    copied = torch.fx.GraphModule(module, graph)
    for key in vars(module).keys() - vars(copied).keys():
        vars(copied)[key] = vars(module)[key]
    return copied, copies, arguments


def quiet_code(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the code that a backend made, as a function whose operators are not seen."""
    # Dynamo disables itself in it, and would do so twice.
    found: Callable[..., Any] = native.quiet(innermost_fn(compiled))
    return found


def skipped(*, below: bool) -> ConvertFrameReturn:
    """Return the answer that runs a frame without compiling it, this time.

    Args:
        below: Whether the frames that it calls run without being compiled, too.
    """
    inner = FrameAction.SKIP if below else FrameAction.DEFAULT
    return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, inner), apply_to_code=False)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compile inside `with` without the compilers' caches, and without donated buffers."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._functorch._aot_autograd import graph_compile

    with (
        torch._inductor.config.patch(force_disable_caches=True),
        torch._functorch.config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
        # Graphs with donated buffers cannot be kept, and without tools there may be none.
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[]),
        _effects_in_order(),
    ):
        yield


def _effects_in_order() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Inductor keeps the order of effects.

    Up to PyTorch 2.14 it notes an operation after which another one runs by the name of its buffer,
    and asks by the name of the operation.
    """
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    original = Scheduler.compute_dependencies

    def compute_dependencies(scheduler: Any) -> None:
        graph: Any = V.graph
        noted = getattr(graph, "additional_star_deps", {})
        for operation in graph.operations if noted else ():
            earlier = noted[operation.get_name()]
            graph.additional_buffer_deps[operation.get_operation_name()].update(earlier)
        original(scheduler)

    return mock.patch.object(Scheduler, "compute_dependencies", compute_dependencies)


#: Settings of Inductor for graphs with routines on the host, which may keep the values they get: no
#: memory serves for another value, and none is that of a recorded CUDA graph.
_ON_HOST = {
    "triton.cudagraphs": False,
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "memory_planning": False,
}


@contextlib.contextmanager
def for_routines_on_host(backend: Any) -> Iterator[bool]:
    """Let a backend compile for routines on the host inside `with`.

    Yields:
        Whether it would have recorded CUDA graphs.
    """
    import torch._inductor.config

    own: Any = getattr(backend_itself(backend), "config", None)  # Of the callable itself.
    settings = own if isinstance(own, dict) else {}
    wanted = settings.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs)
    before = dict(settings)
    settings.update(_ON_HOST)
    try:
        with torch._inductor.config.patch(_ON_HOST):
            yield bool(wanted)
    finally:
        settings.clear()
        settings.update(before)
