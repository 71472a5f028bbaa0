"""Which of torch's C bindings are operators, and their names.

Owns the rule (a schema that returns tensors or writes an argument), the lists of exceptions, and
the table from bindings to schemas. It looks at functions only, never at calls; `signature` handles
positions. Importing this module builds no table.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from amanda_driver_torch.torch_internals.internals import (
    BINDING_OWNERS,
    FunctionSchema,
    OpOverload,
    OpOverloadPacket,
    dispatched_names,
    name_of_packet,
    registered_schemas,
    schema_of,
)

#: Methods of Python's operators, without underscores -> the operation.
_METHODS = (
    "add:add radd:add sub:sub rsub:rsub mul:mul rmul:mul matmul:matmul div:div truediv:div "
    "floordiv:floor_divide mod:remainder pow:pow eq:eq ne:ne lt:lt le:le gt:gt ge:ge neg:neg "
    "pos:positive abs:abs invert:bitwise_not and:bitwise_and rand:bitwise_and or:bitwise_or "
    "ror:bitwise_or xor:bitwise_xor rxor:bitwise_xor lshift:bitwise_left_shift "
    "rshift:bitwise_right_shift iadd:add_ isub:sub_ imul:mul_ idiv:div_ itruediv:div_ "
    "ifloordiv:floor_divide_ imod:remainder_ ipow:pow_ iand:bitwise_and_ ior:bitwise_or_ "
    "ixor:bitwise_xor_ ilshift:bitwise_left_shift_ irshift:bitwise_right_shift_"
)
# Other names of the same operation. The function protocol reports these under the schema's name
# (`x + 1` is `add`) and a method table does not, but an op must have the same name in both.
ALIASES: Mapping[str, str] = types.MappingProxyType(
    {f"__{method}__": name for method, name in (pair.split(":") for pair in _METHODS.split())}
    | {"spmm": "mm", "dsmm": "mm", "hsmm": "hspmm", "saddmm": "sspaddmm"}
)

# Attributes that create an autograd node; every other attribute is metadata.
GETTERS = frozenset({"T", "mT", "H", "mH", "real", "imag"})

# Conversions and moves: written by hand in C++ on top of `to`, without a schema of their own.
CONVERSIONS = frozenset(
    {"bfloat16", "bool", "byte", "cdouble", "cfloat", "char", "cpu", "cuda", "double", "float"}
    | {"half", "int", "ipu", "long", "mtia", "short", "type", "xpu"}
)
# Factories of tensors from Python or foreign data: parsed by hand in C++.
FACTORIES = frozenset(
    {"_from_blob", "as_tensor", "asarray", "from_numpy", "frombuffer", "nested_tensor", "new"}
    | {"new_tensor", "tensor"}
)
# Elementwise Python callbacks, which write the tensor without any ATen op.
CALLBACKS = frozenset({"apply_", "map_", "map2_"})
# Casts between a distributed tensor and its local part.
CASTS = frozenset({"_FromTorchTensor", "_ToTorchTensor"})
# Type slots: indexing is a slot of the type, not a method.
SLOTS = frozenset({"__getitem__", "__setitem__"})
WITHOUT_SCHEMA = CONVERSIONS | FACTORIES | CALLBACKS | SLOTS

# Autograd bookkeeping, which changes what is recorded and not what is computed.
_AUTOGRAD = frozenset({"_backward", "detach_", "requires_grad_", "retain_grad"})
# Storage and allocator bookkeeping: no value is computed, but the tensor may get another storage.
_STORAGE = frozenset(
    {"_fix_weakref", "const_data_ptr", "data_ptr", "record_stream", "set_", "untyped_storage"}
)
# Names of dimensions (older releases have them): metadata, although these return the tensor.
_DIMENSION_NAMES = frozenset({"rename", "rename_"})
# Internals of subclasses and view replay, which torch calls and models do not.
_SUBCLASSES = frozenset(
    {"__new__", "_dtensor__new__", "_make_subclass", "_make_wrapper_subclass", "_rev_view_func"}
    | {"_rev_view_func_unsafe", "_view_func", "_view_func_unsafe", "as_subclass"}
)
# Conversions to Python's own types, by which the value leaves the network.
_TO_PYTHON = frozenset(
    {"__bool__", "__complex__", "__float__", "__index__", "__int__", "__long__", "__nonzero__"}
    | {"__len__", "numpy", "tolist"}
)
# Queries without a schema, and functions that only parse arguments or always raise.
_QUESTIONS = frozenset(
    {"__delitem__", "_is_view", "_parse_to", "_use_count", "element_size", "ndimension", "nelement"}
)
NOT_OPERATORS = _AUTOGRAD | _STORAGE | _DIMENSION_NAMES | _SUBCLASSES | _TO_PYTHON | _QUESTIONS

# In-place ops that change shape or strides, so that a result cannot be copied into the input.
IN_PLACE_METADATA = frozenset(
    {"as_strided_", "moveaxis_", "movedim_", "resize_", "resize_as_", "resize_as_sparse_"}
    | {"_resize_output_", "set_", "sparse_resize_", "sparse_resize_and_clear_", "squeeze_"}
    | {"swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)

_GetSet = types.GetSetDescriptorType
_MethodWrapper = types.MethodWrapperType
_CALLABLE_BINDINGS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


class _Binding(NamedTuple):
    func: object  # held so that its id is not reused
    name: str  # the name shown to users, after `ALIASES`
    is_operator: bool
    is_known: bool  # has a schema, or is in one of the lists above


def is_operator(func: object) -> bool:
    """Return True if a call of `func` is an operator.

    Args:
        func: What an interceptor saw: a C binding, a getter's `__get__`, an op of `torch.ops`.

    Returns:
        True for tensor work; False for metadata, Python functions and anything unknown.
    """
    binding = _bindings_by_id().get(id(func))
    if binding is not None:
        return binding.is_operator
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return _is_dispatcher_operator(func)
    getter = _getter(func)
    return getter is not None and is_operator(getter)


def is_operator_name(name: str) -> bool:
    """Return True if ATen has an operator of this name, for Python functions on top of ATen."""
    return any(map(_does_tensor_work, _schemas().get(ALIASES.get(name, name), ())))


def operator_of(func: object) -> object:
    """Return the raw operator: the descriptor for a getter's `__get__`, else `func` itself."""
    getter = _getter(func)
    return func if getter is None else getter


def type_name(func: object) -> str:
    """Return the op type: the binding's name, or `namespace::name` for ops outside of ATen."""
    if isinstance(func, OpOverload):
        return schema_of(func).name.removeprefix("aten::")
    if isinstance(func, OpOverloadPacket):
        return name_of_packet(func).removeprefix("aten::")
    raw = operator_of(func)
    binding = _bindings_by_id().get(id(raw))
    if binding is not None:
        return binding.name
    return str(getattr(raw, "__name__", type(raw).__name__))


def is_binding(func: object) -> bool:
    """Return True if `func` is one of torch's own, which live for ever and may be cached."""
    if id(func) in _bindings_by_id():
        return True
    raw = operator_of(func)
    return id(raw) in _bindings_by_id() or isinstance(raw, (OpOverload, OpOverloadPacket))


def schemas_of(func: object) -> tuple[FunctionSchema, ...]:
    """Return the schemas that a call of `func` may use; empty if it has none."""
    if isinstance(func, OpOverload):
        return (schema_of(func),)
    if isinstance(func, OpOverloadPacket):
        names = cast("Any", func).overloads()
        return tuple(schema_of(getattr(func, name)) for name in names)
    binding = _bindings_by_id().get(id(operator_of(func)))
    return () if binding is None else _schemas().get(binding.name, ())


def bindings() -> Mapping[str, bool]:
    """Return every candidate binding by its qualified name, and whether it is an operator.

    Returns:
        For example `{"torch._C._VariableFunctions.relu": True, "torch._C.TensorBase.dim": False}`.
    """
    return {name: binding.is_operator for name, binding in _bindings().items()}


def operators() -> Mapping[str, Any]:
    """Return the bindings that are operators, by qualified name."""
    return {name: binding.func for name, binding in _bindings().items() if binding.is_operator}


def unknown_bindings() -> tuple[str, ...]:
    """Return the bindings without a schema or list entry, which are taken not to be operators."""
    return tuple(name for name, binding in _bindings().items() if not binding.is_known)


def _getter(func: object) -> object | None:
    """Return the getset descriptor of an attribute's `__get__`; None for anything else."""
    if type(func) is not _MethodWrapper or func.__name__ != "__get__":
        return None
    descriptor = func.__self__
    return descriptor if isinstance(descriptor, _GetSet) else None


@functools.cache
def _schemas() -> Mapping[str, tuple[FunctionSchema, ...]]:
    """Return ATen's schemas by name: `out=` overloads late, those with dimension names last."""
    # TorchScript registers overloads for strings, lists and scalars under the same names
    # (`aten::add.str`). Only those in the dispatcher can be reached by a binding.
    dispatched = set(dispatched_names())
    found: defaultdict[str, list[FunctionSchema]] = defaultdict(list)
    for schema in registered_schemas():
        if not schema.name.startswith("aten::"):
            continue
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        if schema.name + overload in dispatched:
            found[schema.name.removeprefix("aten::")].append(schema)
    return {name: tuple(sorted(overloads, key=_priority)) for name, overloads in found.items()}


def _priority(schema: FunctionSchema) -> tuple[bool, bool]:
    overload = schema.overload_name
    return ("Dimname" in overload, any(argument.is_out for argument in schema.arguments))


def _does_tensor_work(schema: FunctionSchema) -> bool:
    return schema.is_mutable or any("Tensor" in str(value.type) for value in schema.returns)


@functools.cache
def _is_dispatcher_operator(func: OpOverload | OpOverloadPacket) -> bool:
    return any(map(_does_tensor_work, schemas_of(func)))


def _classify(func: object, name: str) -> _Binding:
    folded = ALIASES.get(name, name)
    if isinstance(func, _GetSet):
        return _Binding(func, name, name in GETTERS, True)
    if name in NOT_OPERATORS:
        return _Binding(func, folded, False, True)
    if name in WITHOUT_SCHEMA:
        return _Binding(func, folded, True, True)
    schemas = _schemas().get(folded, ())
    return _Binding(func, folded, any(map(_does_tensor_work, schemas)), bool(schemas))


@functools.cache
def _bindings() -> Mapping[str, _Binding]:
    found: dict[str, _Binding] = {}
    for prefix, owner in BINDING_OWNERS.items():
        for name in sorted(vars(owner)):
            func = getattr(owner, name)
            if isinstance(func, (*_CALLABLE_BINDINGS, _GetSet)):
                found[f"{prefix}.{name}"] = _classify(func, name)
    return found


@functools.cache
def _bindings_by_id() -> Mapping[int, _Binding]:
    # By id, since builtins with the same C function compare equal (`spmm == mm`).
    return {id(binding.func): binding for binding in _bindings().values()}
