"""Built-in tools on PyTorch, compared with PyTorch's own pruning."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.nn.utils import prune

import amanda
from amanda_core import Session
from amanda_core.results import HasResult, Result
from amanda_tools.dump import Dump
from amanda_tools.effective_path import EffectivePath
from amanda_tools.graph import GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.prune import Prune, PruneNM, PruneTiles, numpy_mask, torch_mask
from amanda_tools.trace import Trace

# Untyped in torch's stubs.
prune_by_torch: Any = prune.l1_unstructured


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3), nn.Flatten(), nn.Linear(256, 5)
    )


@pytest.mark.parametrize("sparsity", [0.1, 0.3, 0.5, 0.95, 1.0])
def test_pruning_is_that_of_pytorch(sparsity: float) -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model, reference = network(), network()
    for layer in (reference[0], reference[2], reference[4]):
        prune_by_torch(layer, "weight", sparsity)
    tool = Prune(sparsity)
    with amanda.apply(tool):
        output = model(x)
        output.square().sum().backward()
    expected = reference(x)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    own: Any = (model[0], model[2], model[4])
    weights = zip(tool.result().weights, own, strict=True)
    layers: Any = (reference[0], reference[2], reference[4])
    for (pruned, layer), there in zip(weights, layers, strict=True):
        assert torch.equal(layer.weight.grad, there.weight_orig.grad)
        assert pruned.pruned == int((there.weight_mask == 0).sum())
        assert pruned.elements == layer.weight.numel()
        assert layer.weight.detach().abs().min() > 0  # The weight itself stays.


def test_a_distributed_weight_is_pruned_as_a_plain_one(tmp_path: Path) -> None:
    values, reference = torch.randn(2, 12), nn.Linear(12, 3)
    model: Any = copy.deepcopy(reference)
    prune_by_torch(reference, "weight", 0.5)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        distribute_module(model, mesh)
        with amanda.apply(Prune(0.5)):
            output = model(distribute_tensor(values, mesh, [Replicate()]))
            output.square().sum().backward()
        reference(values).square().sum().backward()
        assert torch.equal(output.to_local(), reference(values))
        expected: Any = reference.weight_orig
        assert torch.equal(model.weight.grad.to_local(), expected.grad)
    finally:
        torch.distributed.destroy_process_group()


class Packed(torch.Tensor):
    """A quantized weight that only `linear` can read, as classes of torchao are."""

    packed: torch.Tensor

    @staticmethod
    def __new__(cls, packed: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.float32)
        made.packed = packed
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return func(args[0], args[1].packed.float(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a packed tensor")


@pytest.mark.parametrize("make", [Prune, lambda share: PruneNM(2, 4), PruneTiles])
def test_a_weight_of_a_class_without_products_is_listed(make: Callable[[float], Any]) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    packed = torch.randint(-3, 3, (4, 4), dtype=torch.int8)
    model.weight = nn.Parameter(Packed(packed), requires_grad=False)
    expected, tool = model(x), make(0.5)
    with amanda.apply(tool):
        for _ in range(2):
            assert torch.equal(model(x), expected)
    (row,) = tool.result().unreached
    assert "made of other tensors" in row.reason


def test_fully_sharded_weights_are_pruned_where_products_read_them(tmp_path: Path) -> None:
    values, reference = torch.randn(2, 12), nn.Linear(12, 3)
    model: Any = copy.deepcopy(reference)
    prune_by_torch(reference, "weight", 0.5)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        tool = Prune(0.5)
        with amanda.apply(tool):
            model.weight.to_local()
            output = model(values)
            model.reshard()
            local = model.weight.to_local()
        assert torch.equal(output, reference(values))
        assert not (local == 0).any()
    finally:
        torch.distributed.destroy_process_group()


def test_what_has_no_weight_is_listed() -> None:
    tool = Prune(0.5)
    with amanda.apply(tool):
        torch.matmul(torch.ones(2, 2), torch.ones(2, 2))
        F.linear(torch.ones(2), nn.Parameter(torch.arange(4.0).reshape(2, 2)))
    found = tool.result()
    assert found.skipped == ["matmul"]
    assert [weight.pruned for weight in found.weights] == [2]
    assert json.loads(found.to_json())["skipped"] == ["matmul"]
    assert found.table().rows[-1] == ("all", "", 4, 2)
    told = found.table().title.split("; ")
    assert told[:2] == [
        "50.0% of the weights pruned",
        "1 product without a known weight NOT pruned",
    ]
    assert told[2].startswith("making masks took ")
    assert told[3:] == ["50.0% of 4 MACs left", "100.0% of the parameters reached"]
    assert found.tool_seconds > 0


@given(
    st.lists(st.integers(-3, 3), min_size=24, max_size=24),
    st.permutations([0, 1, 2]),
    st.integers(0, 24),
)
def test_masks_are_the_same_in_every_framework_and_layout(
    numbers: list[int], axes: list[int], count: int
) -> None:
    weight = np.asarray(numbers, np.float32).reshape(2, 3, 4)
    expected = numpy_mask(weight, [0, 1, 2], count)
    assert int((expected == 0).sum()) == count  # Ties or not.
    moved = weight.transpose(axes)
    back = list(np.argsort(axes))
    assert np.array_equal(numpy_mask(moved, back, count).transpose(back), expected)
    found = torch_mask(torch.tensor(np.ascontiguousarray(moved)), back, count)
    assert np.array_equal(found.numpy().transpose(back), expected)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("sparsity", [-0.1, 1.5, float("nan")])
def test_a_sparsity_is_a_fraction(sparsity: float) -> None:
    with pytest.raises(ValueError, match="sparsity must be from 0 to 1"):
        Prune(sparsity)


def test_a_trace() -> None:
    trace = Trace(limit=7)
    model = network()
    with amanda.apply(trace):
        for _ in range(2):
            model(torch.ones(2, 3, 8, 8))
            torch.cat([torch.ones(1), torch.ones(2)])
    found = trace.result()
    assert isinstance(trace, HasResult)
    assert isinstance(found, Result)
    facts = {op.type: op for op in found.ops}
    assert facts["conv2d"].name == f"{facts['conv2d'].module}/conv2d"
    assert facts["conv2d"].word == "conv2d"
    assert facts["conv2d"].module.endswith("0")
    assert facts["conv2d"].inputs[:3] == ["float32[2,3,8,8]", "float32[8,3,3,3]", "float32[8]"]
    assert facts["cat"].inputs[0] == "(float32[1] float32[2])"
    assert facts["cat"].calls == 2
    assert (len(found.sequence), found.left_out) == (7, sum(op.calls for op in found.ops) - 7)
    read = json.loads(found.to_json())
    assert read["format"] == "amanda.trace/1"
    assert [op["id"] for op in read["ops"]] == [op.id for op in found.ops]
    assert len(found.table().rows) == len(found.ops)
    with pytest.raises(ValueError, match="limit must not be negative"):
        Trace(limit=-1)


@pytest.mark.parametrize("make", [EffectivePath, GraphTracing, Latency, Memory, Dump])
def test_results_are_written_to_a_folder_that_is_made(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    tool = make()
    with amanda.apply(tool):
        nn.Sequential(nn.Linear(3, 2))(torch.ones(2, 3))
    for folder in (tmp_path / "new" / "own", str(tmp_path / "by name")):
        files = tool.result().write(folder)
        assert files
        assert all(file.parent == Path(folder) and file.is_file() for file in files)


@pytest.mark.slow
def test_results_have_all_forms() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    model, x = network(), torch.ones(1, 3, 8, 8)
    trace, pruning = Trace(limit=1), Prune(0.5)
    with amanda.apply(trace, pruning):
        model(x)
    traced, pruned = trace.result(), pruning.result()
    for result, rows in ((traced, traced.ops), (pruned, pruned.weights)):
        frame = result.to_dataframe()
        assert isinstance(frame, pandas.DataFrame)
        assert list(frame["source"]) == [row.source for row in rows]
        html = result._repr_html_()
        assert all(cell in html for cells in result.table().text() for cell in cells)
    title = traced.table().title
    assert title.startswith("5 operators, 5 executions; the order of 4 is left out; tracing took ")
    assert 0 < traced.tool_seconds < traced.wall_seconds


@pytest.mark.parametrize("kind", [Trace, GraphTracing, Dump])
def test_building_and_loading_a_model_is_left_out_unless_asked_for(kind: Any) -> None:
    def types(tool: Any) -> set[str]:
        with amanda.apply(tool):
            model = nn.Linear(3, 2)
            nn.init.normal_(model.weight)
            model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
            model(torch.ones(1, 3))
        result = tool.result()
        if kind is GraphTracing:
            return {op.type for op in result.graph.ops}
        return {op.type for op in (result.ops if kind is Trace else result.index.ops)}

    assert types(kind()) == {"ones", "linear"}
    found = types(kind(everything=True))
    assert {"ones", "linear", "normal_"} <= found
    assert "copy_" not in found  # What loads a model is none of the program's operators.


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.chosen, self.skipped = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.chosen(self.used(x))


def test_what_the_user_left_out_is_not_called_unread() -> None:
    model, everything = Skipping(), Prune(0.5)
    with amanda.apply(everything):
        model(torch.ones(1, 4))
    unreached = [(one.name, one.reason) for one in everything.result().unreached]
    assert unreached == [("skipped.weight", "not read")]
    some = Prune(0.5).where(amanda.select(module="chosen"))
    with amanda.apply(some):
        model(torch.ones(1, 4))
    reasons = {one.name: one.reason for one in some.result().unreached}
    assert reasons["used.weight"] == "read by no selected operator"


@pytest.mark.one_interceptor
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Prune(0.5), "gradients are not masked on pytorch"),
        (lambda: PruneNM(2, 4), "gradients are not masked on pytorch"),
        (
            lambda: PruneNM(2, 4, method="sr_ste"),
            "gradients are without the decay of pruned weights on pytorch",
        ),
        (lambda: Prune(0.5, score="taylor"), "gradients are not known on pytorch"),
    ],
)
def test_where_gradients_are_not_shown_the_forward_program_is_pruned(
    make: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    can = Session.can
    lacking = {"gradients", "aligned_gradients", "late_gradients", "replace_backward", "autodiff"}
    monkeypatch.setattr(
        Session, "can", lambda self, what, place: what not in lacking and can(self, what, place)
    )
    torch.manual_seed(0)
    model, x, tool = nn.Linear(8, 4), torch.randn(2, 8), make()
    with amanda.apply(tool):
        found = model(x)
    result = tool.result()
    assert said in result.table().title
    if "not known" in said:
        assert [one.reason for one in result.unreached] == ["its score needs gradients"]
        assert torch.equal(found, model(x))
    else:
        weight = model.weight.detach().clone()
        _, indices = weight.view(4, 2, 4).abs().topk(2, -1)
        grouped = torch.zeros(4, 2, 4).scatter(-1, indices, 1.0).view(4, 8)
        least = weight.abs().flatten().kthvalue(16).values
        mask = grouped if isinstance(tool, PruneNM) else (weight.abs() > least).float()
        assert torch.equal(found, F.linear(x, weight * mask, model.bias))
