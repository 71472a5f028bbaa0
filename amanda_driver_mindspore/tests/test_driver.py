"""Contexts of operators: paths, weights, names, facts; and what preflight refuses."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import amanda
from amanda_core.errors import AmandaWarning
from amanda_driver_mindspore import plugin
from amanda_driver_mindspore.facts import FACTS
from amanda_driver_mindspore.interception import ROUTES

from .networks import NETWORKS, numbers


def contexts(run: Any) -> list[amanda.OpContext]:
    """Return the contexts of the operators of a run, in order."""
    found: list[amanda.OpContext] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(found.append)
    with amanda.apply(tool):
        run()
    return found


def test_operators_have_paths_types_weights_and_lines() -> None:
    make, x = NETWORKS["convolutions"]
    network = make()
    weights: dict[str, Any] = {}
    tool = amanda.Tool()

    def look(context: amanda.OpContext) -> None:
        weights[context.name] = {n: weight.name for n, weight in context.weights.items()}

    tool.add_inst_for_op(look)
    found = contexts(lambda: network(x))
    with amanda.apply(tool):
        network(x)
    types = {context.name: (context["type"], context.module_path) for context in found}
    assert types["stem/Conv2D"] == ("conv2d", "stem")
    assert types["blocks.1.norm/BatchNorm"] == ("batch_norm", "blocks.1.norm")
    assert types["first/MatMul"] == ("matmul", "first")
    assert types["pool/MaxPool"][0] == "max_pool2d"
    assert weights["stem/Conv2D"] == {1: "stem.weight"}
    assert weights["blocks.0.conv/BiasAdd"] == {1: "blocks.0.conv.bias"}
    norm = {1: "gamma", 2: "beta", 3: "moving_mean", 4: "moving_variance"}
    expected = {place: f"blocks.0.norm.{name}" for place, name in norm.items()}
    assert weights["blocks.0.norm/BatchNorm"] == expected
    assert [w for w in weights.values() if w == {1: "scale"}]
    by_name = {context.name: context for context in found}
    assert by_name["first/MatMul"]["weight_layout"] == "OI"
    assert by_name["stem/Conv2D"]["input_roles"][:2] == ("input", "weight")
    assert str(by_name["blocks.0/ReLU"].source).startswith("networks.py:")


def test_parts_of_parameters_are_weights() -> None:
    class Halves(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.both = Parameter(numbers(8, 4), name="both")

        def construct(self, x: Any) -> Any:
            return ops.matmul(x, self.both[:4]) + ops.matmul(x, self.both[4:])

    found: list[str] = []
    tool = amanda.Tool()

    def look(context: amanda.OpContext) -> None:
        if context["type"] == "matmul":
            found.extend(f"{w.name}{w.region}" for w in context.weights.values())

    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        Halves()(numbers(2, 4))
    assert found == ["both(slice(0, 4, None),)", "both(slice(4, 8, None),)"]


def test_ids_are_the_same_in_another_process(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import mindspore as ms, numpy as np, amanda\n"
        "net = ms.nn.SequentialCell(ms.nn.Dense(3, 4), ms.nn.ReLU(), ms.nn.Dense(4, 2))\n"
        "tool = amanda.Tool()\n"
        "tool.add_inst_for_op(lambda context: print(context.get_op_id(), context.name))\n"
        "with amanda.apply(tool):\n"
        "    net(ms.Tensor(np.ones((2, 3), np.float32)))\n"
    )
    runs = [
        subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    names = [line.split()[1] for line in runs[0].splitlines()]
    assert names == ["0/MatMul", "0/BiasAdd", "1/ReLU", "2/MatMul", "2/BiasAdd"]


@pytest.mark.parametrize(
    ("tensor", "dtype", "nbytes"),
    [
        (numbers(2, 3), "float32", 24),
        (Tensor([1, 2], ms.int64), "int64", 16),
        (Tensor([True]), "bool", 1),
        (Tensor([1.0, -2.0], ms.bfloat16), "bfloat16", 4),
        (Tensor(3.0, ms.float16), "float16", 2),
    ],
)
def test_facts_about_tensors(tensor: Tensor, dtype: str, nbytes: int) -> None:
    assert FACTS.is_tensor(tensor)
    assert (FACTS.dtype(tensor), FACTS.nbytes(tensor), FACTS.device(tensor)) == (
        dtype,
        nbytes,
        "cpu",
    )
    assert FACTS.shape(tensor) == tensor.shape
    values = FACTS.values(tensor)
    assert values.dtype == (np.uint16 if dtype == "bfloat16" else dtype)
    again = FACTS.restore(values, tensor)
    assert again.dtype == tensor.dtype
    np.testing.assert_array_equal(FACTS.values(again), values)
    storage = FACTS.storage(tensor)
    assert storage is not None
    assert storage.nbytes >= nbytes


def test_views_share_their_memory_with_their_tensor() -> None:
    x = numbers(4, 4)
    one, other = FACTS.storage(x), FACTS.storage(x[1:])
    assert one is not None
    assert other is not None
    assert one[:2] == other[:2]


def test_arithmetic_is_that_of_numpy() -> None:
    arithmetic, x = FACTS.arithmetic, numbers(3, 4)
    assert arithmetic is not None
    special = Tensor([0.5, 1.5, 2.5, -0.5], ms.float32)
    nan = Tensor([np.nan, -1.0, 2.0, np.inf], ms.float32)
    array = x.asnumpy()
    for found, expected in (
        (arithmetic.round(special), np.round(special.asnumpy())),
        (arithmetic.clip(nan, 0, 1), np.clip(nan.asnumpy(), 0, 1)),
        (arithmetic.sum(x, (0,), True), array.sum(0, keepdims=True)),
        (arithmetic.largest(nan, None), np.array([2.0])),
        (arithmetic.largest(x, (1,)), np.abs(array).max(1, keepdims=True)),
        (arithmetic.permute_dims(x, (1, 0)), array.T),
        (arithmetic.pad(x, (1, 2)), np.pad(array, [(0, 1), (0, 2)])),
        (arithmetic.count_nonzero(x > 0, (0,)), np.count_nonzero(array > 0, axis=0)),
        (arithmetic.any(x > 1, (1,)), (array > 1).any(1)),
        (arithmetic.reshape(x, (2, -1)), array.reshape(2, -1)),
        (arithmetic.where(Tensor(array > 0), x, -x), np.abs(array)),
    ):
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-6)


def test_products_say_over_which_axes_they_sum() -> None:
    x, w = numbers(2, 3, 4), numbers(5, 4)
    (first,) = contexts(lambda: ops.MatMul(transpose_b=True)(x[0], w))[1:]
    seen: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(FACTS.contraction(context)))
    with amanda.apply(tool):
        ops.MatMul(transpose_b=True)(x[0], w)
    (found,) = [one for one in seen if one is not None]
    assert first["weight_layout"] == "OI"
    assert found.terms[0][1] == found.terms[1][1]
    assert found.result == found.terms[0][0] + found.terms[1][0]


def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one for one in plugin._problems() if one.severity == "error"] == []
    monkeypatch.setattr(metadata, "version", lambda name: "2.4.6")
    (finding,) = plugin._problems()
    assert finding.severity == "error"
    assert "numpy<2" in finding.fix


def test_older_releases_are_tested_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = plugin._HOOKS.versions
    for version, tried, refused in (
        ("2.10.0", True, False),
        ("2.9.1", False, False),
        ("2.6.0", False, True),
        ("2.11.0", False, False),
    ):
        monkeypatch.setattr(type(versions), "installed", lambda _, version=version: version)
        assert versions.is_tried() is tried
        assert (versions.refusal() is not None) is refused
    monkeypatch.undo()
    subprocess.run([sys.executable, "-m", versions.self_test], check=True)


def test_writers_of_models_warn_and_are_not_seen(tmp_path: Any) -> None:
    net = nn.Dense(2, 2)
    tool = amanda.Tool()
    names: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        names.append(context.name)
        context.insert_after_op(lambda y: y * 2)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        net(numbers(1, 2))
        count = len(names)
        with pytest.warns(AmandaWarning, match="save_checkpoint"):
            ms.save_checkpoint(net, str(tmp_path / "net.ckpt"))
        ms.load_checkpoint(str(tmp_path / "net.ckpt"), net)
    assert len(names) == count
    assert ROUTES.attached == {}
