"""The private names of PyTorch that this driver uses, and what depends on the version among these.

Those that are replaced are in `entry_points`, those of torch's compiler in `dynamo`, those of
`nn.Module` in `modules`. Everything else imports from these. Tables of operators by name
(`bindings`, `overloads`, `vocabulary`) are the one exception: there, an operator that a version
lacks does no harm. Functions are bound when this module is imported, so that calls go to PyTorch
directly. All names without an underscore are offered.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import overrides
from torch._C import (
    Argument as Argument,
    DisableTorchFunction as DisableTorchFunction,
    DisableTorchFunctionSubclass as DisableTorchFunctionSubclass,
    FunctionSchema as FunctionSchema,
    ScriptFunction as ScriptFunction,
    ScriptMethod as ScriptMethod,
    TensorBase as TensorBase,
    parse_schema as parse_schema,
)
from torch._ops import (
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
)
from torch.autograd import Function, forward_ad
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.utils._pytree import tree_map_only as tree_map_only

_C: Any = torch._C
_AUTOGRAD: Any = torch._C._autograd

#: The installed build, such as ``2.13.0+cpu``, and the release without the suffix.
BUILD = str(torch.__version__)
RELEASE = BUILD.partition("+")[0]

# Modes.

function_mode_count: Callable[[], int] = _C._len_torch_function_stack
function_mode_at: Callable[[int], Any] = _C._get_function_stack_at
without_innermost_mode: Callable[[], AbstractContextManager[Any]] = (
    torch.overrides._pop_mode_temporarily
)
pop_function_mode: Callable[[], Any] = _C._pop_torch_function_stack
push_function_mode: Callable[[Any], None] = _C._push_on_torch_function_stack
dispatch_mode_count: Callable[[], int] = _C._len_torch_dispatch_stack
dispatch_mode_at: Callable[[int], Any] = _C._get_dispatch_stack_at

#: Whether neither of the `DisableTorchFunction*` is active.
function_protocol_enabled: Callable[[], bool] = _C._is_torch_function_enabled
#: The `__torch_function__` of a class that overrides nothing.
no_override: Any = _C._disabled_torch_function_impl
DisableTorchDispatch: Any = _C._DisableTorchDispatch

#: Whether the profiler records this thread; then every dispatcher function is reported to it.
profiler_enabled: Callable[[], bool] = _AUTOGRAD._profiler_enabled
record_functions: Callable[[bool], None] = _AUTOGRAD._enable_record_function

autocast_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled
# Read at every new op, where an attribute of the module would take twice as long.
is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
is_inference_mode_enabled: Callable[[], bool] = torch.is_inference_mode_enabled


def function_modes() -> list[Any]:
    """Return the function modes of this thread; empty if the version does not tell."""
    return list(getattr(overrides, "_get_current_function_mode_stack", list)())


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes of this thread; empty if the version does not tell."""
    from torch.utils import _python_dispatch

    return list(getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)())


# Tracers and transforms.

tracing_state: Callable[[], Any] = _C._get_tracing_state
functorch_active: Callable[[], bool] = _C._are_functorch_transforms_active
_functorch: Any = getattr(_C, "_functorch", None)


def unwrapped(value: Any) -> Any:
    """Return what the wrappers of transforms hold, a tensor itself, or another value."""
    if _functorch is not None and isinstance(value, torch.Tensor):
        while _functorch.is_functorch_wrapped_tensor(value):
            value = _functorch.get_unwrapped(value)
    return value


def physical(value: Any) -> Any:
    """Return the tensor in the wrappers of transforms, with the dimensions of `vmap` first."""
    batched: list[int] = []
    tensor = value
    while isinstance(tensor, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            batched.append(_functorch.maybe_get_bdim(tensor))
        tensor = _functorch.get_unwrapped(tensor)
    if tensor is value or not batched:
        return tensor
    # Each level counts dimensions without those of the levels outside of it.
    rest = list(range(tensor.dim()))
    first = [rest.pop(dimension) for dimension in reversed(batched)]
    return tensor.permute(*first, *rest)


def transforms() -> tuple[str, ...]:
    """Return the names of the active transforms, such as ``vmap``, the outermost first."""
    return tuple(one.key().name.lower() for one in _functorch.get_interpreter_stack() or ())


def call_outside_transforms(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with the active transforms suspended."""
    stack: list[Any] = []
    try:
        while _functorch.peek_interpreter_stack() is not None:
            stack.append(_functorch.pop_dynamic_layer_stack())
        return function(*args)
    finally:
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())


_graph_task: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)


def runs_backward() -> bool:
    """Return True inside a backward pass, in whatever thread the engine runs it."""
    return _graph_task() != -1


#: Classes of modes under which values are fake tensors. By name, since importing them would load
#: half of Inductor.
FAKE_TENSOR_MODES = frozenset(
    {
        "FakeTensorMode",
        "ProxyTorchDispatchMode",
        "FunctionalTensorMode",
        "PreDispatchTorchFunctionMode",
    }
)
#: Classes of fake tensors.
FAKE_TENSOR_CLASSES = frozenset({"FakeTensor", "FunctionalTensor", "ProxyTensor", "Proxy"})

#: Modules whose own calls of operators are bookkeeping, such as making fake parameters.
_TRACING_MACHINERY = (
    "torch._subclasses",
    "torch._dynamo",
    "torch._functorch",
    "torch.fx",
    "torch.export",
)
#: Those of them in which programs run their own operators: by an interpreter of graphs, and where
#: an operator itself is compiled or kept from being compiled.
_RUN_PROGRAMS = (
    "torch.fx.interpreter",
    "torch._dynamo.external_utils",
    "torch._dynamo.eval_frame",
)


@functools.cache
def is_machinery(module: str) -> bool:
    """Return True if operators that a module of this name calls are not those of a program."""
    return module.startswith(_TRACING_MACHINERY) and module not in _RUN_PROGRAMS


# Tensors. A descriptor's `__get__` reads the attribute even if a subclass overrides its name.

#: The base of a view.
base_descriptor: Any = vars(TensorBase)["_base"]
read_base: Callable[[torch.Tensor], torch.Tensor | None] = base_descriptor.__get__
negated: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
is_view: Callable[[torch.Tensor], bool] = vars(TensorBase)["_is_view"]
creation_of_view: Callable[[torch.Tensor], Any] = _AUTOGRAD._get_creation_meta
#: Values of `creation_of_view` for views made while no graph was recorded.
DETACHED_VIEWS = (_AUTOGRAD.CreationMeta.NO_GRAD_MODE, _AUTOGRAD.CreationMeta.INFERENCE_MODE)


def address_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> int:
    """Return the address of the memory of a tensor's storage."""
    if _C._is_cow_tensor(tensor):
        return int(data_address(tensor) - tensor.storage_offset() * tensor.element_size())
    return int(storage.data_ptr())


def data_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element."""
    # To ask a tensor that is copied on write for it copies the values.
    copied = _C._is_cow_tensor(tensor)
    return int(_C._data_address(tensor) if copied else tensor.data_ptr())


def version_of(tensor: torch.Tensor) -> int:
    """Return the tensor version: how often its memory was written. Inference tensors have none."""
    return tensor._version


#: The attribute by which `isinstance` takes other tensors for instances of `nn.Parameter`.
PARAMETER_MARK = "_is_param"
has_storage: Callable[[torch.Tensor], bool] = _C._has_storage


def stored_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements that a tensor of the COO layout stores."""
    return int(tensor._nnz())


#: Returns the address of a storage object, not of its data.
storage_address: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


def users_of_storage(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storage objects refer to a storage, this object included."""
    return int(_C._storage_Use_Count(storage._cdata))


#: The module of those tensor methods that are written in Python.
TENSOR_METHODS = "torch._tensor"

#: Functions in it whose operators do not belong to the model: those that enter the backward engine,
#: and those that inspect a tensor, copy it or move it between processes.
LOOKED_AWAY = frozenset(
    {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook"}
    | {"__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "__setstate__", "__dir__"}
    | {"__len__", "__hash__", "__array__", "__dlpack__", "__dlpack_device__", "share_memory_"}
    | {"is_shared", "storage", "storage_type", "_typed_storage", "_reduce_ex_internal"}
)
#: Names of methods that copy an object or write what it holds, of whatever class.
COPIES = frozenset(
    {"__copy__", "__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"}
    | {"state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"}
    | {"save_pretrained"}
)
#: What the names of modules begin with that write or read models.
SERIALIZERS = (
    *("torch.serialization.", "torch.onnx._internal.", "torch.distributed.checkpoint."),
    *("torch.package.", "onnxscript.", "onnx_ir.", "safetensors."),
    *("transformers.core_model_loading.", "peft.utils.save_and_load."),
    *("keras.src.saving.", "keras.src.legacy.saving."),
)
#: The module and the name of the function by which code of Dynamo turns a number of the program's
#: into a tensor.
NUMBER_CONVERSION = ("torch", "_as_tensor_fullprec")

# Autograd.

#: The sequence number that the next node of this thread will get (0.04 us).
next_sequence: Callable[[], int] = _AUTOGRAD._get_sequence_nr
#: The node that the engine runs in this thread; None outside of it.
current_node: Callable[[], Any] = _C._current_autograd_node
AccumulateGrad: Any = _C._functions.AccumulateGrad


#: Returns a node's sequence number.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def set_sequence_number(node: Any, number: int) -> None:
    """Set a node's sequence number: the engine runs the ready node with the highest one first."""
    node._set_sequence_nr(number)


def compiles_backward() -> bool:
    """Return True if compiled autograd collects the graph with its hooks instead of running it."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", False))


def input_metadata(node: Any) -> Iterable[Any]:
    """Return the metadata of a node's gradient arguments; empty if the version does not tell."""
    return getattr(node, "_input_metadata", None) or ()


def saved_sizes(node: Any) -> tuple[int, ...]:
    """Return the sizes that an ``ExpandBackward0`` sums its gradient to."""
    return tuple(node._saved_self_sym_sizes)


def saved_dims(node: Any) -> tuple[int, ...]:
    """Return the dimensions of a ``PermuteBackward0``, or that of an ``UnsqueezeBackward0``."""
    dims = node._saved_dims if hasattr(node, "_saved_dims") else (node._saved_dim,)
    # PyTorch shows them without a sign.
    return tuple(dim - 2**64 if dim >= 2**63 else dim for dim in dims)


def backward_class(function: type[Function]) -> type:
    """Return the type of the nodes of a custom function."""
    kind: type = function._backward_cls
    return kind


#: `Function.apply`: a Python function up to PyTorch 2.13, and a class method in C from 2.14 on.
APPLY: Any = vars(Function)["apply"]
APPLY_IS_PYTHON = isinstance(APPLY, classmethod)


#: The base of the nodes of Python's functions.
FunctionBase: Any = torch._C._FunctionBase


def accumulation_of(leaf: torch.Tensor) -> Any:
    """Return the node that accumulates the gradient of a leaf; operators are called for that."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = leaf.view_as(leaf).grad_fn
    return node.next_functions[0][0]


def forward_ad_level() -> int:
    """Return the nesting level of forward-mode differentiation; negative outside of it."""
    return forward_ad._current_level


_SavedHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def saved_by(node: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield what a node has saved for its backward: the object that holds it, and the tensor."""
    raw, readable = "_raw_saved_", "_saved_"
    for name in dir(node):
        if name.startswith(raw):
            held = getattr(node, name)
            tensors = getattr(node, readable + name.removeprefix(raw), None)
            if not isinstance(held, (list, tuple)):
                held, tensors = [held], [tensors]
            for one, tensor in zip(held, tensors or (), strict=False):
                if isinstance(tensor, torch.Tensor):
                    yield one, tensor


#: Makes a saved tensor; None if the version does not offer that to Python.
make_saved_tensor: Callable[[torch.Tensor, bool], Any] | None = getattr(
    _AUTOGRAD, "_make_saved_tensor", None
)
#: Whether hooks on saved tensors are allowed in the program.
may_hook_saved_tensors: Callable[[], bool] = _AUTOGRAD._saved_tensors_hooks_is_enabled
top_saved_tensor_hooks: Callable[[bool], _SavedHooks | None] = (
    _AUTOGRAD._top_saved_tensors_default_hooks
)
push_saved_tensor_hooks: Callable[..., None] = _AUTOGRAD._push_saved_tensors_default_hooks
pop_saved_tensor_hooks: Callable[[], None] = _AUTOGRAD._pop_saved_tensors_default_hooks

# Operators.

#: Namespaces of bindings, by their names in `bindings()`.
BINDING_OWNERS: Mapping[str, Any] = MappingProxyType(
    {
        "torch._C._VariableFunctions": type(_C._VariableFunctions),
        "torch._C.TensorBase": TensorBase,
        **{
            f"torch._C.{name}": getattr(_C, name)
            for name in ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
            if hasattr(_C, name)
        },
    }
)
#: The namespace whose functions are those of `torch` itself.
FUNCTIONS = "torch._C._VariableFunctions"
#: A binding by which the extension finds torch's library.
some_binding: Any = _C._VariableFunctions.relu
#: The bindings of nested tensors.
nested_bindings: Any = _C._nested

registered_schemas: Callable[[], list[FunctionSchema]] = _C._jit_get_all_schemas
#: Names in the dispatcher, such as ``aten::add.Tensor``.
dispatched_names: Callable[[], list[str]] = _C._dispatch_get_all_op_names
has_kernel_for: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key


def schema_of(overload: OpOverload) -> FunctionSchema:
    """Return the schema of an operator of the dispatcher."""
    return overload._schema


def name_of_packet(packet: OpOverloadPacket) -> str:
    """Return the name that all overloads of an operator share, with its namespace."""
    return packet._qualified_op_name
