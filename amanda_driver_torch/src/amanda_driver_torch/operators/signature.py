"""Binds the arguments of a call to the positions of its op, and calls again with other values.

Owns binding (args, kwargs) to positions, rebuilding the call from edited values, and splitting and
rebuilding an op's result. It never calls an op, and does not decide what an op is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from operator import is_
from typing import Any, cast

from amanda_driver_torch.operators.bindings import is_binding
from amanda_driver_torch.operators.overloads import (
    KINDS,
    Plan,
    Signature,
    kind_of,
    plan_binding,
    plan_call,
)

__all__ = ["BoundCall", "Signature", "bind", "outputs_of", "restructure"]


class BoundCall:
    """One call, as values at the positions of its op's signature.

    Attributes:
        signature: Names of the positions, and which are written.
        values: One value for each position, with defaults filled in; a list of tensors is one
            value.
        attrs: Keyword arguments that are not inputs (dtype, device, generator, ...).
        out: The destination given as `out=`, or None.
        layout: The plan that maps positions to arguments.
        given: The arguments as they were given.
    """

    __slots__ = ("_originals", "attrs", "given", "layout", "out", "signature", "values")

    def __init__(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if plan.in_order:
            values = [*args, *plan.defaults[len(args) :]]
        else:
            values = list(plan.defaults)
            for j, source in enumerate(plan.sources):
                if source is not None:
                    values[j] = kwargs[source] if isinstance(source, str) else args[source]
        for j in plan.fresh:
            values[j] = list(cast("list[Any]", plan.defaults[j]))
        if plan.spread is not None:
            values[plan.spread] = args[cast("int", plan.sources[plan.spread]) :]
        self.layout, self.given = plan, (args, kwargs)
        self._originals = tuple(values)
        self.signature = plan.signature
        self.values: list[Any] = values
        attrs = plan.attrs
        self.attrs: dict[str, Any] = {name: kwargs[name] for name in attrs} if attrs else {}
        outs = plan.outs
        self.out: Any = None
        if outs:
            self.out = kwargs[outs[0]] if len(outs) == 1 else tuple(kwargs[name] for name in outs)

    @property
    def bound(self) -> bool:
        """True if a signature was found. If not, the positions are those of the call itself."""
        return self.layout.bound

    def call_args(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) that call the op with `values`.

        An unchanged object is passed as in the original call, and a changed one in its place. A
        position that the call left out is passed by keyword.

        Args:
            values: One value for each position.

        Raises:
            ValueError: There are more or fewer values than positions.
        """
        if len(values) == len(self._originals) and all(map(is_, values, self._originals)):
            return self.given[0], dict(self.given[1])
        plan = self.layout
        args: list[Any] | None = None
        kwargs = dict(self.given[1])
        for j, (new, old) in enumerate(zip(values, self._originals, strict=True)):
            if new is old:
                continue
            source = plan.sources[j]
            if source is None:
                kwargs[plan.keywords[j]] = new
            elif isinstance(source, str):
                kwargs[source] = new
            else:
                args = list(self.given[0]) if args is None else args
                if j != plan.spread:
                    args[source] = new
                elif isinstance(new, (list, tuple)):
                    args[source:] = new
                else:
                    args[source:] = [new]
        return (self.given[0] if args is None else tuple(args)), kwargs

    def arguments(self) -> Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return a function from values by position to (args, kwargs), which holds no value of this
        call.
        """
        plan, (args, given) = self.layout, self.given
        count = len(args) if plan.spread is None else cast("int", plan.sources[plan.spread])
        named = {source for source in plan.sources if isinstance(source, str)}
        # With the places of the named values: PyTorch lists keywords in their order.
        rest = {name: None if name in named else value for name, value in given.items()}

        def made(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args: list[Any] = [None] * count
            kwargs = dict(rest)
            for j, value in enumerate(values):
                source = plan.sources[j]
                if j == plan.spread:
                    args += value if isinstance(value, (list, tuple)) else [value]
                elif isinstance(source, int):
                    args[source] = value
                elif source is not None:
                    kwargs[source] = value
                elif value is not plan.defaults[j] and (
                    j not in plan.fresh or value != plan.defaults[j]
                ):
                    kwargs[plan.keywords[j]] = value
            return tuple(args), kwargs

        return made


_plans: dict[tuple[object, ...], Plan] = {}


def bind(func: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> BoundCall:
    """Bind one call of `func` to the positions of its op's signature.

    Args:
        func: The called object: a C binding, a getter's `__get__`, an op of `torch.ops`, anything.
        args: The positional arguments, including a method's `self`.
        kwargs: The keyword arguments.

    Returns:
        The bound call. If no signature accepts the arguments, the positions are those of the call
        itself; binding never raises.
    """
    args = tuple(args)
    kwargs = kwargs or {}
    known = KINDS.get
    kinds: list[Any] = [*map(known, map(type, args))]
    if None in kinds:
        kinds = [known(type(value)) or kind_of(value) for value in args]
    if kwargs:
        named = {name: known(type(value)) or kind_of(value) for name, value in kwargs.items()}
        key: tuple[object, ...] = (func, *kinds, tuple(named), *named.values())
    else:
        named = {}
        key = (func, *kinds)
    try:
        plan = _plans.get(key)
    except TypeError:  # It cannot be hashed.
        plan = None
    if plan is None and is_binding(func):
        plan = _plans[key] = plan_binding(func, kinds, named)
    return BoundCall(plan or plan_call(func, len(args), tuple(kwargs)), args, kwargs)


def outputs_of(result: object) -> list[Any]:
    """Return the outputs of an op: the items of a tuple, list or structseq, else the single value.

    An op that returns None (`__setitem__`, `_foreach_add_`) has no outputs.
    """
    if result is None:
        return []
    return list(result) if isinstance(result, (tuple, list)) else [result]


def restructure(template: object, values: Sequence[Any]) -> Any:
    """Return a result of the form of `template` with `values` as its outputs.

    Args:
        template: The op's return value. It is returned itself if nothing changed.
        values: One value for each of `outputs_of(template)`.

    Raises:
        ValueError: There are more or fewer values than outputs.
    """
    pairs = list(zip(values, outputs_of(template), strict=True))
    if all(starmap(is_, pairs)):
        return template
    if not isinstance(template, (tuple, list)):
        return values[0]
    if hasattr(template, "_make"):
        return template._make(values)
    return type(template)(values)
