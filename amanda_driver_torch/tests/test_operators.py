"""What an operator is: the rule against a reviewed table, named cases, and the dispatcher.

Run as a program (`python test_operators.py`), this file prints the table of the installed
torch, to be reviewed and kept as `operators_<version>.txt`.
"""

from __future__ import annotations

import contextlib
import importlib
import textwrap
import timeit
from collections import defaultdict
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amanda_driver_torch.operators import bindings as table
from amanda_driver_torch.operators.bindings import (
    bindings,
    is_operator,
    operator_of,
    schemas_of,
    type_name,
    unknown_bindings,
)

VERSION = torch.__version__.split("+")[0]
TABLES = Path(__file__).parent
# Not all bindings are in torch's stubs.
T: Any = torch.Tensor
C: Any = torch._C


def getter(name: str) -> object:
    return getattr(T, name).__get__


def described(table: Mapping[str, bool]) -> str:
    """Return the table as text: one section for each owner and verdict, names wrapped."""
    sections: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for qualified, verdict in table.items():
        owner, name = qualified.rsplit(".", 1)
        sections[owner, "operators" if verdict else "not operators"].append(name)
    return "\n".join(
        f"[{owner}: {verdict}]\n{textwrap.fill(' '.join(names), 100, break_on_hyphens=False)}\n"
        for (owner, verdict), names in sorted(sections.items())
    )


def test_classification_is_the_reviewed_one() -> None:
    frozen = TABLES / f"operators_{VERSION}.txt"
    if not frozen.exists():
        reviewed = sorted(path.stem.partition("_")[2] for path in TABLES.glob("operators_*.txt"))
        pytest.skip(f"no reviewed table for torch {VERSION}; there are {', '.join(reviewed)}")
    assert described(bindings()).splitlines() == frozen.read_text().splitlines()


def test_every_binding_of_a_reviewed_version_is_known() -> None:
    if not (TABLES / f"operators_{VERSION}.txt").exists():
        pytest.skip(f"torch {VERSION} has not been reviewed: {unknown_bindings()}")
    assert unknown_bindings() == ()


OPERATORS = {
    "relu": [torch.relu, T.relu, torch.ops.aten.relu.default, torch.ops.aten.relu],
    "relu_": [torch.relu_, T.relu_],
    "conv2d": [torch.conv2d],
    "linear": [C._nn.linear],
    "rnn_tanh": [C._VariableFunctions.rnn_tanh],
    "linalg_svd": [torch.linalg.svd, C._linalg.linalg_svd],
    "fft_fft": [torch.fft.fft],
    "special_erf": [torch.special.erf],
    "add": [torch.add, T.add, T.__add__, T.__radd__, torch.ops.aten.add.Tensor],
    "add_": [T.add_, T.__iadd__],
    "eq": [T.eq, T.__eq__],
    "div": [T.__truediv__],
    "bitwise_not": [T.__invert__],
    "bitwise_and": [T.__and__, T.__rand__, torch.bitwise_and],
    "bitwise_left_shift_": [T.__ilshift__],
    "mm": [torch.mm, torch.spmm, torch.dsmm],
    "__getitem__": [T.__getitem__],
    "__setitem__": [T.__setitem__],
    "T": [getter("T")],
    "imag": [getter("imag")],
    "detach": [T.detach, torch.detach],
    "to": [T.to],
    "float": [T.float],
    "type": [T.type],
    "cpu": [T.cpu],
    "clone": [T.clone],
    "contiguous": [T.contiguous],
    "view": [T.view],
    "randn": [torch.randn],
    "zeros": [torch.zeros],
    "arange": [torch.arange],
    "tensor": [torch.tensor],
    "from_numpy": [torch.from_numpy],
    "new_zeros": [T.new_zeros],
    "apply_": [T.apply_],
    "_foreach_add_": [torch._foreach_add_],
    "_fused_adam_": [torch._fused_adam_],
    "segment_reduce": [torch.segment_reduce],
}


@pytest.mark.parametrize(
    ("name", "func"), [(name, func) for name, funcs in OPERATORS.items() for func in funcs]
)
def test_operators_and_their_names(name: str, func: object) -> None:
    assert is_operator(func)
    assert type_name(func) == name


@pytest.mark.parametrize(
    "func",
    [
        *(T.size, T.dim, T.stride, T.item, T.numel, T.is_contiguous, T.data_ptr, T.element_size),
        *(
            T.tolist,
            T.numpy,
            T.__bool__,
            T.__int__,
            T.__index__,
            T.__delitem__,
            C.TensorBase.__len__,
        ),
        *(T.requires_grad_, T.detach_, T.set_, T._make_subclass, T.as_subclass, T._view_func),
        *(torch.is_floating_point, torch.equal, torch.allclose, torch.result_type, torch.can_cast),
        *(torch._assert_async, C._nn._parse_to, torch.is_grad_enabled, C._set_grad_enabled),
        *(getter("shape"), getter("grad_fn"), getter("data"), getter("requires_grad")),
        *(getattr(T, name).__set__ for name in ("data", "requires_grad", "real", "grad")),
        *(torch.ops.aten.sym_size.int, torch.ops.aten.is_same_size, torch.ops.aten.item.default),
        *(
            torch.nn.functional.relu,
            torch.einsum,
            T.norm,
            T.__len__,
            len,
            [].append,
            print,
            None,
            3,
        ),
        *(torch.nn.ReLU(), C._VariableFunctions.relu.__call__, torch.ones(1).__getitem__),
    ],
)
def test_what_is_no_operator(func: object) -> None:
    assert not is_operator(func)


def test_custom_operators() -> None:
    with torch.library._scoped_library("amanda_test_operators", "DEF") as library:
        library.define("make(Tensor x) -> Tensor")
        library.define("fill_(Tensor(a!) x) -> ()")
        library.define("ask(Tensor x) -> bool")
        ops = torch.ops.amanda_test_operators
        assert is_operator(ops.make)
        assert is_operator(ops.make.default)
        assert is_operator(ops.fill_.default)
        assert not is_operator(ops.ask)
        assert not is_operator(ops.ask.default)
        assert type_name(ops.make) == type_name(ops.make.default) == "amanda_test_operators::make"


def test_raw_operator_has_a_name() -> None:
    assert operator_of(getter("T")) is T.T
    assert operator_of(torch.relu) is torch.relu
    for func in (getter("T"), torch.relu, torch.ops.aten.relu, torch.ops.aten.relu.default):
        assert isinstance(getattr(operator_of(func), "__name__", None), str)


def test_metadata_in_place_names_exist() -> None:
    unknown = {name for name in table.IN_PLACE_METADATA if not table.is_operator_name(name)}
    assert unknown <= {"moveaxis_", "movedim_", "sparse_resize_"}


def test_schemas_are_those_a_binding_can_reach() -> None:
    # TorchScript's `aten::add.str(str, str)` is not among them.
    assert {s.overload_name for s in schemas_of(torch.add)} >= {"Tensor", "Scalar"}
    assert all("Tensor" in str(s) for s in schemas_of(torch.add))
    assert schemas_of(T.__radd__) == schemas_of(torch.add)
    assert schemas_of(len) == ()


def test_lookup_makes_no_table_twice() -> None:
    is_operator(torch.relu)
    before = table._bindings_by_id.cache_info().misses, table._schemas.cache_info().misses
    for func in (torch.relu, T.add, getter("T"), len, torch.ops.aten.relu):
        timeit.timeit(lambda f=func: is_operator(f), number=100)  # type: ignore[misc]
    after = table._bindings_by_id.cache_info().misses, table._schemas.cache_info().misses
    assert before == after == (1, 1)


# --- against the dispatcher ---------------------------------------------------------------------

# They answer a question about values, which ATen computes by ops; the answer is Python's.
COMPUTED_ANSWERS = {"_choose_qparams_per_tensor", "allclose"}


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops whose result has a storage that none of their arguments has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all: list[str] = []
        self.fresh: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, T)}
        result = func(*args, **(kwargs or {}))
        storages = {storage(x) for x in given.values()}
        self.all.append(str(func))
        if any(isinstance(x, T) and storage(x) not in storages for x in tree_leaves(result)):
            self.fresh.append(str(func))
        return result


def storage(tensor: torch.Tensor) -> object:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse has none
        return tensor.untyped_storage()._cdata
    return id(tensor)


class Calls(TorchFunctionMode):
    """Notes what each call that torch's Python layer makes sends to the dispatcher."""

    def __init__(self, dispatched: Dispatched) -> None:
        super().__init__()
        self.dispatched = dispatched
        self.metadata: dict[str, list[str]] = {}
        self.silent: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.dispatched.all.clear()
        self.dispatched.fresh.clear()
        result = func(*args, **(kwargs or {}))
        if is_operator(func):
            given = {id(x) for x in tree_leaves((args, kwargs))}
            returned = {id(x) for x in tree_leaves(result)}
            if not self.dispatched.all and not returned & given:
                self.silent[type_name(func)] = 1
        elif table.is_binding(func) and self.dispatched.fresh:
            self.metadata[type_name(func)] = list(self.dispatched.fresh)
        return result


# They would be called with a type, on another device or with an effect on the whole process.
NOT_TO_CALL = {"__new__", "_cufft_clear_plan_cache", "_cufft_set_plan_cache_max_size"}


@pytest.mark.filterwarnings("ignore")
def test_metadata_bindings_make_no_tensors() -> None:
    made: dict[str, list[str]] = {}
    called = 0
    for qualified, is_an_operator in bindings().items():
        name = qualified.rpartition(".")[2]
        if is_an_operator or name in NOT_TO_CALL | COMPUTED_ANSWERS:
            continue
        func: Any = attrgetter(qualified.removeprefix("torch."))(torch)
        for args in ((torch.ones(1),), (torch.ones(2, 2),), (torch.ones(1), torch.ones(1))):
            with contextlib.suppress(Exception), Dispatched() as dispatched:
                func(*args) if callable(func) else func.__get__(*args)
                called += 1
            if dispatched.fresh:
                made[qualified] = dispatched.fresh
    assert made == {}
    assert called > 150


@pytest.fixture(scope="module")
def op_db() -> list[Any]:
    pytest.importorskip("expecttest", reason="torch's own samples need expecttest")
    name = "torch.testing._internal.common_methods_invocations"
    return [op for op in importlib.import_module(name).op_db if "jiterator" not in op.name]


@pytest.mark.parametrize(
    "step",
    [pytest.param(20, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.exhaustive)],
)
@pytest.mark.filterwarnings("ignore")
def test_operators_of_real_calls_reach_the_dispatcher(op_db: list[Any], step: int) -> None:
    with Dispatched() as dispatched:
        calls = Calls(dispatched)
        for op in op_db[::step]:
            if torch.float32 not in op.supported_dtypes("cpu"):
                continue
            for sample in list(op.sample_inputs("cpu", torch.float32))[:2]:
                with contextlib.suppress(NotImplementedError, RuntimeError), calls:
                    op(sample.input, *sample.args, **sample.kwargs)
    assert {name for name in calls.metadata if name not in COMPUTED_ANSWERS} == set()
    assert set(calls.silent) == set()


if __name__ == "__main__":
    print(described(bindings()), end="")
