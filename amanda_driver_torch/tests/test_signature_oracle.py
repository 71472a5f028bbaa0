"""Positions of a call against an independent oracle: torch's own samples, called again by them."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amanda_driver_torch.operators.bindings import CONVERSIONS, is_operator, type_name
from amanda_driver_torch.operators.signature import BoundCall, bind

# Bindings that parse their arguments by hand and have no schema.
FALLBACKS = {
    "tensor": "data of any kind, then riders: no schema says it",
    **dict.fromkeys(
        CONVERSIONS,
        "type conversions: `to` under a name that holds the dtype",
    ),
}
NEW = object()
UNSUITABLE = ("jiterator", "empty", "lstsq")  # needs CUDA; leave some results undefined


class Rebinding(TorchFunctionMode):
    """Calls every operator with the arguments made by binding."""

    def __init__(self, rebuild: Callable[[Any, BoundCall], Any]) -> None:
        super().__init__()
        self.rebuild = rebuild
        self.seen: Counter[str] = Counter()
        self.unbound: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_operator(func):
            return func(*args, **kwargs)
        bound = bind(func, args, kwargs)
        self.seen[type_name(func)] += 1
        if not bound.bound:
            self.unbound.add(type_name(func))
        return self.rebuild(func, bound)


def same(func: Any, bound: BoundCall) -> Any:
    args, kwargs = bound.call_args(list(bound.values))
    assert len(args) == len(bound.given[0])
    assert all(new is old for new, old in zip(args, bound.given[0], strict=True))
    assert kwargs == bound.given[1] or [*kwargs] == [*bound.given[1]]
    return func(*args, **kwargs)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return copy.requires_grad_(value.requires_grad) if copy.is_floating_point() else copy
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([copied(item) for item in value])
    return value


def every_slot(func: Any, bound: BoundCall) -> Any:
    """Treat every position as edited, including those that the call left out."""
    if not bound.bound:
        return func(*bound.given[0], **bound.given[1])
    bound._originals = (NEW,) * len(bound.values)
    args, kwargs = bound.call_args([copied(value) for value in bound.values])
    return func(*args, **kwargs)


def by_name(func: Any, bound: BoundCall) -> Any:
    """Pass every argument by the name of its position, if torch accepts names."""
    names = bound.signature.names
    is_method = hasattr(func, "__objclass__")
    takes_names = not (is_method and "input" not in names) and not func.__name__.startswith("__")
    if not bound.bound or not takes_names:
        return func(*bound.given[0], **bound.given[1])
    found = zip(names, bound.layout.sources, bound.values, strict=True)
    given = {name: value for name, source, value in found if source is not None}
    args = (given.pop("input"),) if is_method else ()
    kwargs = {**given, **bound.attrs, **({} if bound.out is None else {"out": bound.out})}
    again = bind(func, args, kwargs)
    assert again.signature == bound.signature
    assert all(again.values[names.index(name)] is value for name, value in given.items())
    if not isinstance(func, (OpOverload, OpOverloadPacket)):  # those take schemas' own names
        return func(*args, **kwargs)
    return func(*bound.given[0], **bound.given[1])


def samples(number: int) -> Iterator[tuple[str, Callable[[Rebinding | None], Any]]]:
    """Yield reproducible runs of sampled ops of torch's own tests, in all their spellings."""
    pytest.importorskip("expecttest", reason="torch's own samples need expecttest")
    op_db = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    ops = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    for op in sorted(random.Random(0).sample(ops, number), key=lambda op: op.name):
        if any(word in op.name for word in UNSUITABLE):
            continue
        spellings = (op.op, op.method_variant, op.inplace_variant, op.operator_variant)
        given = list(op.sample_inputs("cpu", torch.float32))
        for sample in random.Random(0).sample(given, min(3, len(given))):
            for func in spellings:
                if func is not None:
                    yield op.name, run_of(func, sample)


def run_of(func: Callable[..., Any], sample: Any) -> Callable[[Rebinding | None], Any]:
    def run(mode: Rebinding | None) -> Any:
        torch.manual_seed(0)
        first, args, kwargs = tree_map_only(
            torch.Tensor, lambda t: t.detach().clone(), (sample.input, sample.args, sample.kwargs)
        )
        if mode is None:
            return func(first, *args, **kwargs)
        with mode:
            return func(first, *args, **kwargs)

    return run


def equal(first: Any, second: Any) -> bool:
    pairs: Iterable[tuple[Any, Any]] = zip(tree_leaves(first), tree_leaves(second), strict=True)
    for one, other in pairs:
        if type(one) is not type(other):
            return False
        if isinstance(one, torch.Tensor):
            try:
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            except AssertionError:
                return False
    return True


@pytest.mark.parametrize(
    "number",
    [pytest.param(40, marks=pytest.mark.slow), pytest.param(350, marks=pytest.mark.exhaustive)],
)
@pytest.mark.filterwarnings("ignore")
def test_rebuilt_calls_compute_the_same(number: int) -> None:
    modes = [Rebinding(rebuild) for rebuild in (same, every_slot, by_name)]
    wrong: dict[tuple[str, str], str] = {}
    runs = 0
    for name, run in samples(number):
        try:
            expected = run(None)
        except Exception:  # a sample that this spelling does not take
            continue
        runs += 1
        for mode in modes:
            try:
                result = run(mode)
            except Exception as error:
                wrong[name, mode.rebuild.__name__] = repr(error)
            else:
                if not equal(expected, result):
                    wrong[name, mode.rebuild.__name__] = "another result"
    assert wrong == {}
    assert runs > 2.8 * number
    assert len(modes[0].seen) > 0.85 * number
    assert modes[0].unbound <= set(FALLBACKS), modes[0].unbound - set(FALLBACKS)
