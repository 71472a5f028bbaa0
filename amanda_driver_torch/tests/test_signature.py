"""Positions of a call: each rule by name, then torch's own samples as an independent oracle."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from amanda_driver_torch.operators import signature
from amanda_driver_torch.operators.signature import BoundCall, bind, outputs_of, restructure

# Not all bindings are in torch's stubs.
T: Any = torch.Tensor
C: Any = torch._C
V = C._VariableFunctions
x = torch.ones(2, 3)
y = torch.full((2, 3), 2.0)
w = torch.ones(4, 3)
condition = torch.ones(2, 3, dtype=torch.bool)


def shown(bound: BoundCall) -> list[Any]:
    """Return the values with tensors by name, so that lists can be compared."""
    names = {id(x): "x", id(y): "y", id(w): "w", id(condition): "condition"}
    return [
        [names.get(id(item), item) for item in value]
        if isinstance(value, (list, tuple))
        else names.get(id(value), value)
        for value in bound.values
    ]


def call(func: object, *args: Any, **kwargs: Any) -> BoundCall:
    return bind(func, args, kwargs)


CASES: Mapping[str, tuple[BoundCall, list[Any]]] = {
    # positional or by keyword, an argument has one position; what is left out is its default
    "linear": (call(C._nn.linear, x, w), ["x", "w", None]),
    "linear, weight by keyword": (call(C._nn.linear, x, weight=w), ["x", "w", None]),
    "linear, all by keyword": (call(C._nn.linear, weight=w, input=x), ["x", "w", None]),
    "conv2d": (call(torch.conv2d, x, w), ["x", "w", None, [1, 1], [0, 0], [1, 1], 1]),
    "conv2d, one int for two": (
        call(torch.conv2d, x, w, None, 2),
        ["x", "w", None, 2, [0, 0], [1, 1], 1],
    ),
    "conv2d, padding by name": (
        call(torch.conv2d, x, w, padding="same"),
        ["x", "w", None, [1, 1], "same", [1, 1], 1],
    ),
    "a keyword-only default": (call(T.add, x, y), ["x", "y", 1]),
    "a keyword-only argument": (call(torch.add, x, y, alpha=3), ["x", "y", 3]),
    # overloads
    "scalar other": (call(T.add, x, 2), ["x", 2, 1]),
    "reflected": (call(T.__radd__, x, 2), ["x", 2, 1]),
    "number as a tensor": (call(torch.add, 1, x), [1, "x", 1]),
    "max": (call(torch.max, x), ["x"]),
    "max of two": (call(torch.max, x, y), ["x", "y"]),
    "max along": (call(torch.max, x, 1), ["x", 1, False]),
    "fewest positions": (call(torch.std, x), ["x", True]),
    "arange": (call(torch.arange, 5), [5]),
    "arange from to": (call(torch.arange, 1, 5), [1, 5]),
    # self
    "method with self first": (call(T.where, x, condition, y), ["condition", "x", "y"]),
    "function of it": (call(torch.where, condition, x, y), ["condition", "x", "y"]),
    "self as input": (call(torch.relu, input=x), ["x"]),
    "method polygamma": (call(T.polygamma, x, 1), [1, "x"]),
    # lists
    "view spread": (call(T.view, x, 3, 2), ["x", [3, 2]]),
    "view one": (call(T.view, x, -1), ["x", [-1]]),
    "view list": (call(T.view, x, (3, 2)), ["x", [3, 2]]),
    "view keyword": (call(T.view, x, size=[3, 2]), ["x", [3, 2]]),
    "view dtype": (call(T.view, x, torch.int32), ["x", torch.int32]),
    "permute spread": (call(T.permute, x, 1, 0), ["x", [1, 0]]),
    "reshape spread": (call(T.reshape, x, 3, 2), ["x", [3, 2]]),
    "expand spread": (call(T.expand, x, 2, 2, 3), ["x", [2, 2, 3], False]),
    "zeros spread": (call(torch.zeros, 2, 3), [[2, 3]]),
    "zeros list": (call(torch.zeros, [2, 3]), [[2, 3]]),
    "zeros empty": (call(torch.zeros, ()), [[]]),
    "new_zeros spread": (call(T.new_zeros, x, 2, 3), ["x", [2, 3]]),
    "tensors spread": (call(V.broadcast_tensors, x, y), [["x", "y"]]),
    "cat": (call(torch.cat, [x, y]), [["x", "y"], 0]),
    "cat of a tuple": (call(torch.cat, (x, y), dim=1), [["x", "y"], 1]),
    "index_put": (
        call(T.index_put_, x, (None, y), w),
        ["x", [None, "y"], "w", False],
    ),
    "foreach": (call(torch._foreach_add_, [x, y], 1.0), [["x", "y"], 1.0]),
    # keyword aliases
    "axis": (call(torch.sum, x, axis=1), ["x", 1, False]),
    "keepdims": (call(T.sum, x, dim=1, keepdims=True), ["x", 1, True]),
    "numpy names": (call(torch.add, x1=x, x2=y), ["x", "y", 1]),
    "numpy x": (call(torch.sum, x=x, axis=(0, 1)), ["x", [0, 1], False]),
    # values that torch takes for scalars
    "numpy float": (call(T.mul, x, np.float32(2)), ["x", np.float32(2)]),
    "numpy int": (call(T.transpose, x, np.int64(0), np.int64(1)), ["x", 0, 1]),
    "numpy bool": (call(torch.sum, x, 1, np.bool_(True)), ["x", 1, np.bool_(True)]),
    "tensor as scalar": (
        call(torch.full, (2,), torch.tensor(1.0)),
        [[2], torch.tensor(1.0)],
    ),
    "tensor as int": (call(torch.sum, x, torch.tensor(0)), ["x", torch.tensor(0), False]),
    "python type as dtype": (call(T.to, x, float), ["x", float, False, False]),
    # deprecated orders
    "add with alpha first": (call(torch.add, x, 2, y), ["x", "y", 2]),
    "sub_ with alpha first": (call(T.sub_, x, 2, y), ["x", "y", 2]),
    "addmm with scalars first": (call(torch.addmm, 2, x, 3, y, w), ["x", "y", "w", 2, 3]),
    "addmm with beta first": (call(torch.addmm, 2, x, y, w), ["x", "y", "w", 2, 1]),
    "method addmm": (call(T.addmm, x, 2, 3, y, w), ["x", "y", "w", 2, 3]),
    "addcmul with value first": (call(torch.addcmul, x, 2, y, w), ["x", "y", "w", 2]),
    # slots and getters
    "getitem": (call(T.__getitem__, x, 0), ["x", 0]),
    "getitem of a tuple": (call(T.__getitem__, x, (0, ...)), ["x", [0, ...]]),
    "setitem": (call(T.__setitem__, x, 0, y), ["x", 0, "y"]),
    "getter": (call(getattr(T, "T").__get__, x), ["x"]),  # noqa: B009
    # parsed by hand
    "to device": (call(T.to, x, "cpu"), ["x", "cpu", None, False, False]),
    "to other": (call(T.to, x, y), ["x", "y", False, False]),
    "nonzero": (call(T.nonzero, x, as_tuple=True), ["x", True]),
    # torch.ops
    "overload": (call(torch.ops.aten.add.Tensor, x, y), ["x", "y", 1]),
    "packet": (call(torch.ops.aten.add, x, 2), ["x", 2, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_positions(case: str) -> None:
    bound, expected = CASES[case]
    assert bound.bound
    assert shown(bound) == expected
    assert len(bound.signature.names) == len(bound.values)
    args, kwargs = bound.call_args(bound.values)
    assert (args, kwargs) == bound.given


@pytest.mark.parametrize(
    ("func", "args", "names"),
    [
        (C._nn.linear, (x, w), "input weight bias"),
        (torch.add, (x, y), "input other alpha"),
        (T.view, (x, 6), "input size"),
        (T.__getitem__, (x, 0), "input indices"),
        (T.__setitem__, (x, 0, 1), "input indices value"),
        (T.mT.__get__, (x,), "input"),
        (torch.where, (condition, x, y), "condition input other"),
        (torch.ops.aten.relu.default, (x,), "input"),
    ],
)
def test_names(func: object, args: tuple[Any, ...], names: str) -> None:
    assert bind(func, args).signature.names == tuple(names.split())


def test_riders_are_attributes() -> None:
    generator = torch.Generator()
    bound = call(torch.randn, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert bound.values == [(2, 3)]
    assert bound.attrs == {
        "generator": generator,
        "dtype": torch.float64,
        "requires_grad": True,
    }
    assert call(torch.zeros, 2, device="cpu", pin_memory=False).attrs["device"] == "cpu"
    assert call(torch.sum, x, dtype=None).attrs == {"dtype": None}
    assert call(T.clone, x, memory_format=torch.preserve_format).bound
    # A positional dtype of the schema is a position.
    assert call(torch.softmax, x, 1, torch.float64).values[1:] == [1, torch.float64]
    assert call(torch.softmax, x, 1, dtype=torch.float64).values[1:] == [1, torch.float64]


def test_out_is_no_input() -> None:
    out = torch.empty(2, 3)
    bound = call(torch.add, x, y, out=out)
    assert shown(bound) == ["x", "y", 1]
    assert bound.out is out
    assert bound.signature.mutated == frozenset()
    values, indices = torch.empty(2, 1), torch.empty(2, 1, dtype=torch.int64)
    assert call(torch.topk, x, 1, out=(values, indices)).out == (values, indices)
    overload = call(torch.ops.aten.topk.values, x, 1, values=values, indices=indices)
    assert overload.out == (values, indices)
    assert shown(overload) == ["x", 1, -1, True, True]
    assert call(torch.add, x, y).out is None


@pytest.mark.parametrize(
    ("func", "args", "mutated", "in_place"),
    [
        (T.add, (x, y), set(), False),
        (T.add_, (x, y), {0}, True),
        (T.__iadd__, (x, y), {0}, True),
        (torch.relu_, (x,), {0}, True),
        (T.__setitem__, (x, 0, 1), {0}, True),
        (torch._foreach_add_, ([x], 1), {0}, True),
        (T.apply_, (x, abs), {0}, True),
        (torch.embedding_renorm_, (x, y, 1.0, 2.0), {0}, True),
        (torch.batch_norm, (x, None, None, y, w, True, 0.1, 1e-5, True), {3, 4}, False),
        (torch.instance_norm, (x, None, None, y, w, True, 0.1, 1e-5, True), {3, 4}, False),
        (torch.native_batch_norm, (x, None, None, y, w, True, 0.1, 1e-5), {3, 4}, False),
        (torch.layer_norm, (x, [3]), set(), False),
        (torch._native_batch_norm_legit, (x, w, w, y, w, True, 0.1, 1e-5), {3, 4}, False),
    ],
)
def test_writes(func: object, args: tuple[Any, ...], mutated: set[int], in_place: bool) -> None:
    signature = bind(func, args).signature
    assert signature.mutated == mutated
    assert signature.in_place is in_place


def edited(bound: BoundCall, **new: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = bound.signature.names
    return bound.call_args(
        [new.get(name, old) for name, old in zip(names, bound.values, strict=True)]
    )


def test_an_edited_value_takes_the_place_of_the_old() -> None:
    new = torch.zeros(4, 3)
    assert edited(call(C._nn.linear, x, w), weight=new) == ((x, new), {})
    assert edited(call(C._nn.linear, x, weight=w), weight=new) == ((x,), {"weight": new})
    assert edited(call(torch.relu, input=x), input=new) == ((), {"input": new})
    assert edited(call(torch.sum, x, axis=1), dim=0) == ((x,), {"axis": 0})
    assert edited(call(T.where, x, condition, y), condition=new) == ((x, new, y), {})
    assert edited(call(torch.addmm, 2, x, 3, y, w), mat2=new) == ((2, x, 3, y, new), {})


def test_a_value_that_the_call_left_out_is_added_by_keyword() -> None:
    assert edited(call(C._nn.linear, x, w), bias=y) == ((x, w), {"bias": y})
    assert edited(call(torch.add, x, y), alpha=2) == ((x, y), {"alpha": 2})
    assert edited(call(T.sum, x, 1, dtype=torch.float64), keepdim=True) == (
        (x, 1),
        {"dtype": torch.float64, "keepdim": True},
    )


def test_the_spelling_of_a_spread_list_is_kept() -> None:
    assert edited(call(T.view, x, 3, 2), size=[6]) == ((x, 6), {})
    assert edited(call(T.view, x, -1), size=(3, 2)) == ((x, 3, 2), {})
    assert edited(call(T.view, x, -1), size=6) == ((x, 6), {})
    assert edited(call(T.view, x, (3, 2)), size=(6,)) == ((x, (6,)), {})
    assert edited(call(T.view, x, 3, 2), input=y) == ((y, 3, 2), {})
    assert edited(call(V.broadcast_tensors, x, y), tensors=[y, y]) == ((y, y), {})


def test_the_call_itself_is_never_edited() -> None:
    args, kwargs = [x, w], {"bias": None}
    bound = bind(C._nn.linear, args, kwargs)
    bound.values[1] = y
    new_args, new_kwargs = bound.call_args(bound.values)
    assert new_args[1] is y
    new_kwargs["bias"] = y
    assert args[1] is w
    assert kwargs == {"bias": None}


def test_the_order_of_keywords_is_kept() -> None:
    # Python functions see it, and PyTorch's messages print it.
    given = {"beta": 2, "mat2": torch.eye(2), "out": torch.ones(2, 2), "alpha": 3}
    call = bind(torch.addmm, (torch.ones(2, 2), torch.eye(2)), given)
    _, again = call.arguments()(call.values)
    assert list(again) == list(call.call_args([torch.ones(2, 2), *call.values[1:]])[1])
    assert list(again) == list(given)


def test_a_default_list_belongs_to_one_call() -> None:
    first = call(torch.conv2d, x, w)
    first.values[3][0] = 7
    assert call(torch.conv2d, x, w).values[3] == [1, 1]


def test_a_wrong_number_of_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        call(torch.relu, x).call_args([x, y])


def test_calls_of_one_kind_are_parsed_once() -> None:
    bind(torch.add, (x, y))
    before = len(signature._plans)
    for alpha in range(50):
        bind(torch.add, (torch.ones(alpha), y))
    assert len(signature._plans) == before
    # A keyword named like a kind of value is not a value.
    assert call(torch.add, x, other=y).bound
    assert not call(torch.add, x, object(), y).bound


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2


def python_function(first: Any, second: Any = 0, *rest: Any, **named: Any) -> None: ...


def test_without_a_signature_positions_are_those_of_the_call() -> None:
    bound = call(python_function, x, 1, 2, dtype=torch.float64, third=y, out=w)
    assert bound.signature.names == ("first", "second", "arg2", "third")
    assert shown(bound) == ["x", 1, 2, "y"]
    assert bound.attrs == {"dtype": torch.float64}
    assert bound.out is w
    assert not bound.bound
    assert edited(bound, third=x, arg2=5) == (
        (x, 1, 5),
        {"dtype": torch.float64, "third": x, "out": w},
    )


class Odd:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args: Any) -> None: ...


@pytest.mark.parametrize("func", [T.float, T.half, T.long, T.cpu, T.T, T.real])
def test_conversions_and_properties_write_nothing(func: object) -> None:
    bound = bind(func, (x,))
    assert bound.bound
    assert (bound.signature.names, bound.signature.mutated) == (("input",), frozenset())


@pytest.mark.parametrize(
    ("func", "args", "names"),
    [
        (T.type, (x, "torch.FloatTensor"), ("input", "arg1")),
        (torch.tensor, ([1.0],), ("input",)),
        (Double.apply, (x,), ("arg0",)),
        (torch.relu, ("no tensor", 1, 2), ("input", "arg1", "arg2")),
        (torch.relu, (), ()),
        (Odd(), (x,), ("arg0",)),
        (None, (x,), ("arg0",)),
    ],
)
def test_a_fallback_raises_nothing(
    func: object, args: tuple[Any, ...], names: tuple[str, ...]
) -> None:
    bound = bind(func, args)
    assert not bound.bound
    assert bound.signature.names == names
    assert bound.call_args(bound.values) == (args, {})


def test_script_functions_fall_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(python_scripted)
    assert bind(script, (x,)).values == [x]


def python_scripted(value: torch.Tensor) -> torch.Tensor:
    return value + 1


def test_nothing_is_kept_of_a_python_callable_or_a_value() -> None:
    def local(value: Any) -> None: ...

    value = torch.ones(5)
    bind(local, (value,))
    bind(torch.relu, (value,))
    gone: list[weakref.ref[Any]] = [weakref.ref(local), weakref.ref(value)]
    del local, value
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


Pair = namedtuple("Pair", "first second")


def test_outputs_and_back() -> None:
    top = torch.topk(x, 2)
    results: list[Any] = [x, (x, y), [x, y], top, Pair(x, y), torch.split(x, 1), 3, [x], ()]
    for result in results:
        outputs = outputs_of(result)
        assert restructure(result, outputs) is result
        new = restructure(result, [torch.zeros(1)] * len(outputs))
        assert type(new) is type(result) or not isinstance(result, (tuple, list))
        assert len(outputs_of(new)) == len(outputs)
    assert isinstance(restructure(top, [x, y]), torch.return_types.topk)
    assert restructure(top, [x, y]).indices is y
    assert restructure(x, [y]) is y
    assert outputs_of(None) == []
    assert restructure(None, []) is None
    with pytest.raises(ValueError, match="zip"):
        restructure(top, [x])
