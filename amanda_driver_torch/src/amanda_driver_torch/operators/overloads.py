"""Overload resolution: the ATen schema that a call uses, by the rules of torch's argument parser.

Owns how arguments find their positions (self of a method, keyword aliases, spread ints, attributes,
deprecated orders), and the plan of each kind of call. It handles kinds of arguments only;
`signature` handles calls. Nothing here runs twice for one kind of call. The long module is one
chain from slots to overloads to plans.
"""

from __future__ import annotations

import functools
import numbers
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from amanda_driver_torch.operators.bindings import (
    CONVERSIONS,
    GETTERS,
    is_binding,
    operator_of,
    schemas_of,
    type_name,
)
from amanda_driver_torch.torch_internals.internals import (
    Argument,
    FunctionSchema,
    OpOverload,
    OpOverloadPacket,
    has_kernel_for,
    parse_schema,
)

# Keywords that tell how a result is made, not from which values: attributes, not inputs.
ATTRIBUTES = frozenset({"device", "dtype", "generator", "layout", "memory_format", "names"}) | {
    "pin_memory",
    "requires_grad",
}
_ATTRIBUTE_TYPES = ("Device", "Generator", "Layout", "MemoryFormat", "ScalarType")

# torch's parser accepts NumPy's names, and `input` for the `self` of schemas.
_KEYWORD_ALIASES: Mapping[str, tuple[str, ...]] = {
    "input": ("self",),
    "x": ("self", "input"),
    "a": ("self", "input"),
    "x1": ("self", "input"),
    "x2": ("other",),
    "axis": ("dim",),
    "keepdims": ("keepdim",),
}

# Bindings whose arguments are parsed by hand in C++, differently from their schemas, if any.
_HAND_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "__getitem__": ("(Tensor(a) self, Any indices) -> Tensor(a)",),
    "__setitem__": ("(Tensor(a!) self, Any indices, Any value) -> ()",),
    "nonzero": ("(Tensor self, *, bool as_tuple=False) -> Tensor",),
    "to": (
        "(Tensor(a) self, Device? device=None, ScalarType? dtype=None, bool non_blocking=False, "
        "bool copy=False, *, MemoryFormat? memory_format=None) -> Tensor(a)",
        "(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool copy=False, *, "
        "MemoryFormat? memory_format=None) -> Tensor(a)",
        "(Tensor(a) self, Tensor tensor, bool non_blocking=False, bool copy=False, *, "
        "MemoryFormat? memory_format=None) -> Tensor(a)",
    ),
}
_GETTER = ("(Tensor(a) self) -> Tensor(a)",)
_CONVERSION = ("(Tensor(a) self, *, MemoryFormat? memory_format=None) -> Tensor(a)",)

# Ops that update their running statistics although their schema has no `!`. (`max_norm` needs no
# entry: embedding and embedding_bag renormalize by a separate op, `embedding_renorm_`.)
_UPDATES_STATISTICS = frozenset(
    {"_batch_norm_impl_index", "batch_norm", "batch_norm_gather_stats", "batch_norm_update_stats"}
    | {"batch_norm_gather_stats_with_counts", "cudnn_batch_norm", "instance_norm"}
    | {"miopen_batch_norm", "native_batch_norm"}
)
_STATISTICS = frozenset({"running_mean", "running_var"})

# The kinds of argument that a slot takes, with what each costs; None takes anything.
_Slot: TypeAlias = "Mapping[str, int] | None"

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Signature:
    """The positions of one op.

    Attributes:
        names: A name for each position; `input` for the `self` of schemas.
        mutated: The positions that the op may write, without `out=`.
        in_place: Whether the op writes its position 0 (`add_`, `__setitem__`).
        whole: Whether torch's generated autograd code differentiates the op as a whole. A composite
            op is differentiated through the ops that it calls.
        one_node: Whether the op makes one backward node, which computes the gradients of all
            inputs.
    """

    names: tuple[str, ...]
    mutated: frozenset[int]
    in_place: bool
    whole: bool = False
    one_node: bool = False


@dataclass(slots=True)
class Plan:
    """Where the calls of one kind have the value of each position of their signature.

    Calls are of one kind if the callable and the kinds of all arguments are the same.
    """

    signature: Signature
    sources: tuple[int | str | None, ...]  # of each position: args[k], kwargs[name] or left out
    defaults: tuple[object, ...]  # of each position, for those left out
    fresh: tuple[int, ...]  # positions whose default is a list, which must be copied
    spread: int | None  # the position that takes args[sources[spread]:] as one value
    keywords: tuple[str, ...]  # by which to pass positions that the call left out
    attrs: tuple[str, ...]  # keywords of the call that are attributes, and not inputs
    outs: tuple[str, ...]  # keywords of the call that name tensors to write, as `out`
    bound: bool  # whether a signature was found
    in_order: bool = False  # whether the positions are the positional arguments, then defaults
    _numbered: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        count = sum(source is not None for source in self.sources)
        self.in_order = self.spread is None and self.sources[:count] == tuple(range(count))

    def numbered(
        self, count: int, names: tuple[str, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return `sources`, `attrs` and `outs` as numbers of arguments, -1 for none.

        Args:
            count: The number of positional arguments.
            names: The names of the others, which follow them.
        """
        if self._numbered[:2] != (count, names):
            numbers = {name: count + place for place, name in enumerate(names)}
            sources = [
                -1 if s is None else numbers[s] if isinstance(s, str) else s for s in self.sources
            ]
            attrs, outs = ([numbers[name] for name in of] for of in (self.attrs, self.outs))
            self._numbered = (count, names, (tuple(sources), tuple(attrs), tuple(outs)))
        return self._numbered[2]  # type: ignore[no-any-return]


# --- kinds of arguments, and the slots that accept them -----------------------------------------

KINDS: dict[type, str] = {
    torch.Tensor: "Tensor",
    torch.nn.Parameter: "Tensor",
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    type(None): "None",
    type: "ScalarType",  # `dtype=float`
    torch.device: "Device",
    torch.dtype: "ScalarType",
    torch.Generator: "Generator",
    torch.layout: "Layout",
    torch.memory_format: "MemoryFormat",
    torch.SymBool: "bool",
    torch.SymFloat: "float",
    torch.SymInt: "int",
}
_LIST_OF = {kind: f"List[{kind}]" for kind in {*KINDS.values(), "list", "other"}}

# The costs of inexact matches. Overloads that match all arguments exactly are preferred, then
# deprecated orders, then scalars held in tensors and numbers that become tensors.
_DEPRECATED = 1
_SCALARS = {"bool": 0, "int": 0, "float": 0, "complex": 0, "Tensor": 2}
_ACCEPTS: Mapping[str, Mapping[str, int]] = {
    "Tensor": {"Tensor": 0, "bool": 3, "int": 3, "float": 3, "complex": 3},
    "number": _SCALARS,
    "int": {"int": 0, "bool": 1, "Tensor": 2},
    "float": {"float": 0, "int": 0, "bool": 1, "Tensor": 2},
    "bool": {"bool": 0, "Tensor": 2},
    "Device": {"Device": 0, "str": 0, "int": 1},
}


def kind_of(value: object) -> str:
    """Return the coarse kind of a value whose exact type is not in `KINDS`."""
    if isinstance(value, (list, tuple)):
        # Overloads never differ beyond the first element; None matches any element in Tensor?[].
        first = next((item for item in value if item is not None), None)
        if isinstance(first, (list, tuple)):
            return _LIST_OF["list"]
        return _LIST_OF[KINDS.get(type(first)) or kind_of(first)]
    if isinstance(value, torch.Tensor):
        return "Tensor"
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return "bool"
    if isinstance(value, numbers.Integral):
        return "int"
    if isinstance(value, numbers.Real):
        return "float"
    if isinstance(value, numbers.Complex):
        return "complex"
    return "str" if isinstance(value, str) else "other"


def _slot(argument: Argument) -> _Slot:
    described = str(argument.real_type)
    taken: dict[str, int] = {}
    if described.startswith("Optional["):
        described = described[len("Optional[") : -1]
        taken["None"] = 0
    if described == "Any":
        return None
    if not described.startswith("List["):
        return {**taken, **_accepted(described)}
    element = described[len("List[") : -1]
    if element.startswith("Optional["):
        element = element[len("Optional[") : -1]
    items = _accepted(element)
    taken |= {_LIST_OF[kind]: cost for kind, cost in items.items()}
    taken[_LIST_OF["None"]] = 0  # empty
    if getattr(argument, "N", None) is not None:
        taken.update(items)  # `int[2] stride` takes one int
    return taken


def _accepted(described: str) -> Mapping[str, int]:
    found = _ACCEPTS.get(described)
    return {described if described in _LIST_OF else "other": 0} if found is None else found


# --- schemas as overloads that a call may match -------------------------------------------------


class _Parameter(NamedTuple):
    name: str
    slot: _Slot
    default: object
    is_list: bool


class _Overload(NamedTuple):
    """One way to write a call of one schema."""

    signature: Signature
    parameters: tuple[_Parameter, ...]  # in the order of positions
    order: tuple[int, ...]  # the positions that positional arguments fill, in the call's order
    attributes: Mapping[str, _Slot]
    outs: frozenset[str]
    cost: int


def _is_attribute(argument: Argument) -> bool:
    described = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    return argument.kwarg_only and (argument.name in ATTRIBUTES or described in _ATTRIBUTE_TYPES)


def _overloads_of(schema: FunctionSchema, is_method: bool) -> Iterator[_Overload]:
    inputs = [a for a in schema.arguments if not a.is_out]
    shown = [a for a in inputs if not _is_attribute(a)]
    names = [a.name for a in shown]
    signature, parameters = _signature(schema, shown), tuple(map(_parameter, shown))
    attributes = {a.name: _slot(a) for a in inputs if _is_attribute(a)}
    outs = frozenset(a.name for a in schema.arguments if a.is_out)
    order = [names.index(a.name) for a in shown if not a.kwarg_only]
    if is_method and "self" in names:  # `x.where(condition, y)`: self is not always first
        order.sort(key=lambda j: names[j] != "self")
    for cost, variant in ((0, order), *_deprecated(names, order, is_method)):
        yield _Overload(signature, parameters, tuple(variant), attributes, outs, cost)


def _signature(schema: FunctionSchema, shown: Sequence[Argument]) -> Signature:
    hidden = _STATISTICS if schema.name.removeprefix("aten::") in _UPDATES_STATISTICS else ()
    mutated = frozenset(j for j, a in enumerate(shown) if a.is_write or a.name in hidden)
    whole = _is_whole(schema)
    return Signature(
        names=tuple("input" if a.name == "self" else a.name for a in shown),
        mutated=mutated,
        in_place=0 in mutated,
        whole=whole,
        one_node=whole and all(result.alias_info is None for result in schema.returns),
    )


def _parameter(argument: Argument) -> _Parameter:
    return _Parameter(
        name=argument.name,
        slot=_slot(argument),
        default=argument.default_value if argument.has_default_value() else _REQUIRED,
        is_list="List[" in str(argument.real_type) and getattr(argument, "N", None) is None,
    )


def _is_whole(schema: FunctionSchema) -> bool:
    if not schema.name.startswith("aten::") or schema.name.startswith("aten::_foreach_"):
        return False
    name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
    try:
        return not has_kernel_for(name, "CompositeImplicitAutograd")
    except RuntimeError:
        return False  # It is not in the dispatcher.


def _deprecated(
    names: list[str], order: list[int], is_method: bool
) -> Iterator[tuple[int, list[int]]]:
    """Return old orders with scalars before tensors: `add(x, alpha, y)`, `addmm(beta, x, ...)`."""
    if "self" not in names:
        return
    first = names.index("self")
    rest = [j for j in order if j != first]
    beta = [names.index("beta")] if "beta" in names else []
    after = [names.index(name) for name in ("alpha", "value") if name in names]
    if not (beta or after) or set(beta + after) & set(order):
        return
    for scalars in (after, []) if beta else (after,):
        head = [first, *beta] if is_method else [*beta, first]
        yield _DEPRECATED, [*head, *scalars, *rest]


@functools.cache
def _overloads(func: object) -> tuple[_Overload, ...]:
    raw = operator_of(func)
    is_method = getattr(raw, "__objclass__", None) is not None
    written: tuple[str, ...] = ()
    if raw is not func:
        written = _GETTER
    elif not isinstance(func, (OpOverload, OpOverloadPacket)):
        name = type_name(func)
        other = _GETTER if name in GETTERS else _CONVERSION if name in CONVERSIONS else ()
        written = _HAND_WRITTEN.get(name, other)
    schemas = schemas_of(func)
    if written:
        schemas = tuple(parse_schema(f"aten::written{text}") for text in written)
    return tuple(overload for schema in schemas for overload in _overloads_of(schema, is_method))


# --- plans --------------------------------------------------------------------------------------


def plan_binding(func: object, kinds: Sequence[str], named: Mapping[str, str]) -> Plan:
    """Return the plan of a call of the torch binding `func` with arguments of these kinds."""
    found: tuple[int, int, Plan] | None = None
    for overload in _overloads(func):
        plan, cost = _match(overload, kinds, named)
        # Among equal matches, prefer the fewest omitted positions: `std(x)` is `std`.
        if plan is not None and (found is None or (cost, plan.sources.count(None)) < found[:2]):
            found = (cost, plan.sources.count(None), plan)
    return plan_call(func, len(kinds), tuple(named)) if found is None else found[2]


def _match(
    overload: _Overload, kinds: Sequence[str], named: Mapping[str, str]
) -> tuple[Plan | None, int]:
    """Return a plan for the call by this overload, if it matches, and the cost of the match."""
    parameters = overload.parameters
    sources: list[int | str | None] = [None] * len(parameters)
    spread = _spread(overload, kinds)
    if spread is None and len(kinds) > len(overload.order):
        return None, 0
    prices: list[int | None] = [overload.cost]
    for k, j in zip(range(len(kinds)), overload.order, strict=False):
        sources[j] = k
        prices.append(0 if j == spread else _price(parameters[j].slot, kinds[k]))
    attrs, outs = [], []
    for name, kind in named.items() if None not in prices else ():
        position = _position(overload, name)
        if position is not None:
            is_free = sources[position] is None
            prices.append(_price(parameters[position].slot, kind) if is_free else None)
            sources[position] = name
        elif name in {"out", *overload.outs}:
            outs.append(name)
        else:
            attrs.append(name)
            prices.append(_price_of_attribute(overload, name, kind))
    defaults = [parameter.default for parameter in parameters]
    missing = [j for j, source in enumerate(sources) if source is None]
    if None in prices or any(defaults[j] is _REQUIRED for j in missing):
        return None, 0
    plan = Plan(
        signature=overload.signature,
        sources=tuple(sources),
        defaults=tuple(defaults),
        fresh=tuple(j for j in missing if isinstance(defaults[j], list)),
        spread=spread,
        keywords=tuple(parameter.name for parameter in parameters),
        attrs=tuple(attrs),
        outs=tuple(outs),
        bound=True,
    )
    return plan, sum(filter(None, prices))


def _price_of_attribute(overload: _Overload, name: str, kind: str) -> int | None:
    if name not in overload.attributes:
        return 1 if name in ATTRIBUTES else None
    return 0 if kind == "None" else _price(overload.attributes[name], kind)


def _price(slot: _Slot, kind: str) -> int | None:
    return 0 if slot is None else slot.get(kind)


def _position(overload: _Overload, name: str) -> int | None:
    for known in (name, *_KEYWORD_ALIASES.get(name, ())):
        for j, parameter in enumerate(overload.parameters):
            if parameter.name == known:
                return j
    return None


def _spread(overload: _Overload, kinds: Sequence[str]) -> int | None:
    """Return the position that takes all trailing ints or tensors: `view(2, 3)`, `zeros(2, 3)`."""
    order = overload.order
    others = [j for j in order if overload.parameters[j].name != "self"]
    if len(others) != 1 or order[-1] != others[0] or len(kinds) < len(order):
        return None
    parameter = overload.parameters[others[0]]
    trailing = kinds[len(order) - 1 :]
    slot = parameter.slot or {}
    if not parameter.is_list or any(_LIST_OF.get(kind) not in slot for kind in trailing):
        return None
    return others[0]


def plan_call(func: object, count: int, named: tuple[str, ...]) -> Plan:
    """Return the plan if no signature is known: arguments as given, then keywords."""
    known: tuple[str, ...] = ("input",) if is_binding(func) else ()
    if isinstance(func, (types.FunctionType, types.MethodType)):
        code = func.__code__
        known = code.co_varnames[isinstance(func, types.MethodType) : code.co_argcount]
    names = [*known[:count], *(f"arg{k}" for k in range(min(len(known), count), count))]
    shown = [name for name in named if name not in ATTRIBUTES and name != "out"]
    name = type_name(func)
    in_place = is_binding(func) and name.endswith("_") and not name.endswith("__") and count > 0
    return Plan(
        signature=Signature((*names, *shown), frozenset({0} if in_place else ()), in_place),
        sources=(*range(count), *shown),
        defaults=(None,) * (count + len(shown)),
        fresh=(),
        spread=None,
        keywords=(),
        attrs=tuple(name for name in named if name in ATTRIBUTES),
        outs=("out",) if "out" in named else (),
        bound=False,
    )
