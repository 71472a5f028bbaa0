"""The entry points of PyTorch that are replaced while a session is attached, by private names.

Owns their names, and what depends on the release among these. Modules that `import torch` does not
load are only named, and are patched when the program imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.variable import Variable

from amanda_core.driver_kit import local_of

#: Argument of the functions that script a class: how many frames away its names are looked up.
FRAMES_UP = "_frames_up"
#: The function that adds a hook to those of a node: its owner and attribute name.
HOOK_REGISTRATION = (Function, "_register_hook")
#: The object whose `run_backward` runs a backward pass: its owner and attribute name.
ENGINE = (Variable, "_execution_engine")
#: The code of the function that calls it, in a tuple; empty where that is another one.
ENGINE_CALLERS = tuple(
    function.__code__
    for function in [getattr(torch.autograd.graph, "_engine_run_backward", None)]
    if function is not None
)
#: Modules whose decorators wrap functions of torch that are deprecated.
DECORATING = ("typing_extensions", "warnings", "_py_warnings")
#: The function by which modules ask whether to run as one operator.
FUSED_PATH = (torch.backends.mha, "get_fastpath_enabled")
#: The function that makes the initial gradients of a backward pass.
GRADIENT_SEEDS = (torch.autograd, "_make_grads")
#: The function that sets tensor versions back after writes, as FSDP2 does: its owner and attribute
#: name.
VERSION_RESET = (torch._C._autograd, "_unsafe_set_version_counter")
#: Module -> functions, also as ``Class.method``, whose operators are none of the program's.
QUIET_FUNCTIONS = {
    "torch._tensor_str": ("_str",),
    "torch.fx._symbolic_trace": ("Tracer.trace",),  # It runs the model on proxies.
    "torch.serialization": ("_load", "_legacy_load"),
    "torch.nn.modules.module": ("Module.load_state_dict",),
    "torch.optim.optimizer": ("Optimizer.state_dict", "Optimizer.load_state_dict"),
    # They run a stage on values that nobody has set.
    "torch.distributed.pipelining.stage": (
        *("PipelineStage._forward_metadata_inference", "PipelineStage._shape_inference"),
        "PipelineStage._backward_metadata_inference",
    ),
    "transformers.modeling_utils": ("PreTrainedModel.from_pretrained",),
    "keras.src.layers.layer": ("Layer.set_weights",),
}
#: Modules that have all of theirs in every release.
QUIET_ALWAYS = ("torch._tensor_str", "torch.fx._symbolic_trace", "torch.jit._trace")
#: Module -> such a function that writes the model for other programs -> what it is called there.
#: The functions that a public one looks up when it is called, where there are such: programs have
#: imported the public one before tools are applied.
WRITERS = {
    "torch.nn.modules.module": {"Module.state_dict": "state_dict"},
    "torch.nn.parameter": {"Parameter.__reduce_ex__": "pickle"},
    "torch.storage": {"TypedStorage.__reduce__": "pickle"},
    "torch.serialization": {"_save": "torch.save", "_legacy_save": "torch.save"},
    # Both run the model three times, and compare the runs.
    "torch.jit._trace": {"_trace_impl": "torch.jit.trace", "trace_module": "torch.jit.trace"},
    "torch.jit._script": {"_script_impl": "torch.jit.script", "script": "torch.jit.script"},
    "torch.export._trace": {"_export": "torch.export"},
    "torch.export": {"export": "torch.export", "save": "torch.export.save"},
    "torch.onnx._internal.exporter._compat": {"export_compat": "torch.onnx.export"},
    "torch.onnx._internal.torchscript_exporter.utils": {"export": "torch.onnx.export"},
    "torch.onnx._internal.exporter._onnx_program": {"ONNXProgram.save": "torch.onnx"},
    "torch.onnx.utils": {"export": "torch.onnx.export"},
    "torch.distributed.checkpoint.state_dict_saver": {
        "save": "torch.distributed.checkpoint",
        "_save_state_dict": "torch.distributed.checkpoint",
    },
    "torch.package.package_exporter": {"PackageExporter.save_pickle": "torch.package"},
    "safetensors.torch": {"_flatten": "safetensors", "_flatten_as_ptr": "safetensors"},
    "transformers.modeling_utils": {"PreTrainedModel.save_pretrained": "save_pretrained"},
    "diffusers.models.modeling_utils": {"ModelMixin.save_pretrained": "save_pretrained"},
    "keras.src.layers.layer": {"Layer.get_weights": "get_weights"},
    "keras.src.models.model": {
        "Model.save": "model.save",
        "Model.save_weights": "model.save_weights",
        "Model.export": "model.export",
    },
    "accelerate.accelerator": {
        "Accelerator.save_model": "accelerate",
        "Accelerator.save_state": "accelerate",
        "Accelerator.get_state_dict": "accelerate",
    },
}


class Compiled(NamedTuple):
    """The module of Dynamo that decides how compiled callables run.

    Attributes:
        module: Its name.
        callback: Its function that decides what to do with a frame: None runs it eagerly.
        frame_count: Its function, if there is one, by which `fullgraph=True` counts compiled
            frames: it sets the count and returns the previous one. A callable that starts to count
            (from below 0) raises if it counts none.
        region: Its function, if there is one, that sets the region of recompilations.
        wrapper: Name of the code that calls a compiled callable.
    """

    module: str = "torch._dynamo.eval_frame"
    callback: str = "_callback_from_stance"
    frame_count: str = "set_fullgraph_compiled_frame_count"
    region: str = "set_eval_frame_isolate_recompiles_id"
    wrapper: str = "compile_wrapper"


COMPILED_FRAMES = Compiled()
#: Where Dynamo keeps the `nn.Module.__call__` that it does not trace, but only the `forward` of.
TRACED_MODULES = ("torch._dynamo.variables.nn_module", "unpatched_nn_module_call")

#: Dynamo's own export, which traces a frame as a compiled callable does.
DYNAMO_EXPORT = ("torch._dynamo", "export")


def count_frame(set_count: Callable[[int], int] | None) -> None:
    """Count a frame that runs eagerly as compiled, by Dynamo's function that sets the count."""
    if set_count is not None:
        count = set_count(-1)
        set_count(max(count, 1) if count >= 0 else count)


def dynamo_rules(listed: bool) -> dict[Any, Any]:
    """Return Dynamo's rules for functions of torch, by the functions.

    Args:
        listed: Whether to let it make them if it has not yet; otherwise there are none then.
    """
    make = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    if make is None or not (listed or make.cache_info().currsize):
        return {}
    rules: dict[Any, Any] = make()
    return rules


def only_exports(callback: Any) -> bool:
    """Return True if Dynamo's callback traces a frame for `torch._dynamo.export`."""
    return bool(getattr(callback, "_export", False))


def compiled_by(frame: FrameType) -> Any:
    """Return the function that a frame of the wrapper of a compiled callable runs."""
    return local_of(frame, "fn")


def runs_higher_order(frame: FrameType) -> bool:
    """Return True if a frame of the wrapper of a compiled callable runs a higher-order operator.

    torch itself compiles a call that a program makes eagerly: it can differentiate only the graphs
    that it makes of the functions inside.
    """
    module = str(getattr(compiled_by(frame), "__module__", ""))
    return module.startswith(("torch._higher_order_ops.", "torch.nn.attention.flex_attention"))


#: Modules of functions that are not operators themselves: containers, whose operators are seen
#: individually, and parts of a custom operator that runs.
PARTS_OF_OTHERS = ("torch.utils.checkpoint", "torch._library.autograd")
#: Functions of `torch.utils.checkpoint` between the user's call and the checkpointed function. The
#: second one exists from PyTorch 2.14 on.
CHECKPOINT_FUNCTIONS = ("checkpoint", "_checkpoint_impl")
#: The generator around a first run that saves no inputs: the first one that exists.
CHECKPOINT_FIRST_RUNS = (
    "_checkpoint_without_reentrant_generator_impl",  # From PyTorch 2.14 on.
    "_checkpoint_without_reentrant_generator",
)
