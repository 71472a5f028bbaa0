"""The parts of Dynamo and AOTAutograd on which compiled callables depend.

Owns every private name of torch's compiler, and which releases these were tried with. Importing
this module imports torch's compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.output_graph
import torch._dynamo.variables.nn_module
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import (
    set_eval_frame_isolate_recompiles_id as set_recompile_region,
)
from torch._C._dynamo.eval_frame import set_fullgraph_compiled_frame_count as set_frame_count
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import ConstantSource, GlobalStateSource
from torch._dynamo.types import ConvertFrameReturn
from torch._functorch._aot_autograd.runtime_wrappers import (
    _disable_saved_tensors_hooks as without_saved_tensors_hooks,
)
from torch._higher_order_ops.effects import _EffectType
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from amanda_driver_torch._torch.extension import native

__all__ = [
    "CHECKPOINT",
    "CREATE_PROXY",
    "MODULE_CALL",
    "MODULE_NOTE",
    "STATE_CHANGES",
    "ConvertFrameReturn",
    "FakeTensor",
    "HigherOrderOperator",
    "add_buffer",
    "effectful",
    "fresh_symbols",
    "guard_identity",
    "guard_scope",
    "is_dynamos",
    "is_transform",
    "new_recompile_region",
    "quiet_code",
    "set_frame_count",
    "set_recompile_region",
    "skipped",
    "tree_leaves",
    "tree_map",
    "uncached",
    "unset_fake_temporarily",
    "users_backend",
    "with_backend",
    "without_cuda_graphs",
    "without_saved_tensors_hooks",
]

#: Runs a graph that is a checkpointed function.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
#: Makes a node of a graph that Dynamo traces.
CREATE_PROXY = (torch._dynamo.output_graph.SubgraphTracer, "create_proxy")
#: Traces the call of a module.
MODULE_CALL = (torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable, "call_function")
#: Notes such a call, by another source.
MODULE_NOTE = (torch._dynamo.variables.nn_module, "record_nn_module_stack")
#: Functions in graphs that change how later nodes run.
STATE_CHANGES = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
    }
)


def effectful(library: torch.library.Library, name: str) -> None:
    """Declare that calls of a custom operator are neither dropped nor merged nor reordered."""
    library._register_effectful_op(name, _EffectType.ORDERED)


def is_dynamos(namespace: Mapping[str, Any]) -> bool:
    """Return True if code with these globals is of torch's compiler."""
    return str(namespace.get("__name__", "")).startswith("torch._dynamo")


def is_transform(function: Any) -> bool:
    """Return True if a graph calls this function to begin or end a transform of `torch.func`."""
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("torch._functorch", "torch._C._functorch"))


def fresh_symbols(fake_mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which runs on fake tensors may leave symbols that nothing uses."""
    shapes = None if fake_mode is None else fake_mode.shape_env
    return contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()


def new_recompile_region() -> int:
    """Return the number of a new region, whose code is limited apart from that of others."""
    return next(torch._dynamo.eval_frame._next_isolate_recompiles_id)


def users_backend(callback: Any) -> Callable[..., Any] | None:
    """Return the backend of a callback of Dynamo; None if it is not of a known kind."""
    convert: Any = getattr(callback, "_torchdynamo_orig_backend", None)
    if not isinstance(callback, CatchErrorsWrapper) or not hasattr(convert, "_clone_with_backend"):
        return None
    found: Callable[..., Any] = convert._torchdynamo_orig_backend
    return found


def with_backend(callback: Any, backend: Callable[..., Any], front: Any) -> CatchErrorsWrapper:
    """Return a callback of Dynamo like another one, but with another backend.

    Args:
        callback: The other one.
        backend: The backend.
        front: What Dynamo calls. It finds the backend, and the code compiled by it, through this.
    """
    convert = callback._torchdynamo_orig_backend._clone_with_backend(backend)
    found = CatchErrorsWrapper(convert, callback.hooks)
    front._torchdynamo_orig_backend = found
    return found


def add_buffer(graph: torch.fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Let a graph read a tensor as a buffer, whose values may change."""
    graph.register_buffer(name, tensor)
    sources: Any = getattr(graph, "_param_name_to_source", None)
    if sources is not None:  # AOTAutograd refuses a tensor without one.
        sources[name] = ConstantSource(name)


def guard_identity(source: Any) -> None:
    """Let the code that is being compiled serve no other object at this place of the program."""
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def guard_scope(number: int) -> None:
    """Let the code that is being compiled serve only in the scope with this number."""
    check = native.in_scope(number)

    def create(builder: Any, guard: Any) -> None:
        builder.guard_manager.root.add_lambda_guard(check, [f"___amanda_scope() == {number}"], None)

    install_guard(torch._guards.Guard(GlobalStateSource(), create))


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
    """Compile inside `with` without reading or writing the compilers' caches."""
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(force_disable_caches=True),
        torch._functorch.config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
    ):
        yield


@contextlib.contextmanager
def without_cuda_graphs(backend: Any) -> Iterator[bool]:
    """Let a backend record no CUDA graphs inside `with`; yield whether it would have."""
    import torch._inductor.config

    name = "triton.cudagraphs"
    innermost = getattr(backend, "_torchdynamo_orig_backend", backend)
    own: Any = getattr(innermost, "config", None)  # The mode or the options of the callable.
    settings = own if isinstance(own, dict) else {}
    wanted = settings.get(name, torch._inductor.config.triton.cudagraphs)
    before = dict(settings)
    settings[name] = False
    try:
        with torch._inductor.config.patch({name: False}):
            yield bool(wanted)
    finally:
        settings.clear()
        settings.update(before)
