"""Operands that two processes hold in parts are quantized as the whole ones of one process."""

# mypy: allow-untyped-calls
# Much of torch.distributed is not annotated.

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda_driver_torch import groups
from amanda_tools.quantize import Quantize
from amanda_tools.sensitivity import Sensitivity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_interceptor,
    pytest.mark.skipif(sys.platform != "linux", reason="gloo is tried on Linux"),
]

PROCESSES, CALLS = 2, 3
TOOLS: dict[str, Callable[[], Quantize]] = {
    "static": Quantize,
    "static, activations": lambda: Quantize(weights="none"),
    "mse": lambda: Quantize(observer="mse"),
    "dynamic": lambda: Quantize("dynamic"),
    "per channel": lambda: Quantize("dynamic", per="channel", per_token=True),
    "fp8": lambda: Quantize("dynamic", weights="fp8_e4m3", activations="fp8_e5m2"),
}


class Gathering(amanda.Tool):
    """Looks at the first operand of each linear layer as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            context.insert_before_op(self.look, [0], observe=True, logical=True)

    def look(self, value: torch.Tensor) -> None:
        assert value.shape == (4, 8)


class Attention(nn.Module):
    """Heads, of which each process has half, and a layer that sums over them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(8, 16) for _ in range(3))
        self.out = nn.Linear(16, 8)
        #: What the operators got.
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Plain tensors, of which nothing says that they are parts of others.
        of_heads = [
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        found = F.scaled_dot_product_attention(*of_heads).transpose(1, 2).flatten(2)
        names = ("query", "key", "value", "found", "x")
        self.seen = dict(zip(names, (*of_heads, found, x), strict=True))
        output: torch.Tensor = self.out(found)
        return output


class Scores(nn.Module):
    """A sum in which some processes hide elements, and others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shares: torch.Tensor = (self.layer(x) + mask).softmax(-1)
        return shares


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 8, generator=generator) for _ in range(CALLS)]


def called(model: Any, tool: amanda.Tool, count: Callable[[], int] = lambda: 0) -> Iterator[Any]:
    """Yield the output of each call, and how many collectives there were before it."""
    with amanda.apply(tool):
        for x in inputs():
            yield model(x).detach().flatten().tolist(), count()


def scales(tool: Quantize) -> dict[str, float | None]:
    return {f"{one.op}/{one.operand}": one.scale for one in tool.result().activations}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "c10d" in function.namespace:
            self.found += not any(one in str(function) for one in ("wait", "_wrap_tensor"))
        return function(*args, **(kwargs or {}))


def parallel(mesh: Any) -> Any:
    columns = {name: ColwiseParallel() for name in ("query", "key", "value")}
    return parallelize_module(Attention(), mesh, {**columns, "out": RowwiseParallel()})


def attention(mesh: Any, make: Callable[[], Any]) -> dict[str, Any]:
    tool, model = make(), parallel(mesh)
    with Counting() as counting:
        rows = [*called(model, tool, lambda: counting.found)]
    counts = [count for _, count in rows]
    return {
        "outputs": [output for output, _ in rows],
        "collectives": [now - last for last, now in zip([0, *counts], counts, strict=False)],
        "scales": scales(tool) if isinstance(tool, Quantize) else {},
        "notes": list(tool.result().notes),
    }


def replicated(mesh: Any) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    distribute_module(layer, mesh)
    return layer


def of_rows(mesh: Any, rank: int) -> dict[str, Any]:
    """Return the scales of inputs whose rows are divided unevenly, or of which one has all."""
    found: dict[str, Any] = {}
    for name, count in (("uneven", 3), ("of one", 1)):
        layer, tool = replicated(mesh), Quantize()
        with amanda.apply(tool):
            for x in inputs():
                layer(distribute_tensor(x.flatten(0, 1)[:count], mesh, [Shard(0)]))
        found[name] = scales(tool)
    layer, tool = replicated(mesh), Quantize()
    with amanda.apply(tool):
        for x in (torch.zeros(4, 8), *(x[0] * rank for x in inputs())):
            layer(DTensor.from_local(x, mesh, [Shard(0)]))
    found["zeros"] = scales(tool)
    return found


def partial(mesh: Any, make: Callable[[], Quantize]) -> dict[str, Any]:
    """Return the output for terms of a sum, and how many collectives a tool adds."""
    layer, tool = replicated(mesh), make()
    terms = DTensor.from_local(inputs()[0][0], mesh, [Partial()], run_check=False)
    with Counting() as counting:
        plain = layer(terms)
        before = counting.found
        with amanda.apply(tool):
            outputs = [layer(terms) for _ in range(CALLS)]
        added = counting.found - (CALLS + 1) * before
    whole = plain.full_tensor()
    return {
        "off": [(one.full_tensor() - whole).abs().max().item() for one in outputs],
        "weights": [one.scales for one in tool.result().weights],
        "added": added,
        "notes": tool.result().notes,
    }


def masks(rank: int) -> list[str]:
    model, tool = nn.parallel.DistributedDataParallel(Scores()), Quantize()
    with amanda.apply(tool):
        for _ in range(CALLS):
            hidden = torch.zeros(4, 4)
            hidden[:, 3] = -torch.inf if rank else 0.0
            model(torch.ones(4, 4), hidden)
    result = tool.result()
    return [*result.notes, *(one.op for one in result.activations)]


def alone(mesh: Any, rank: int) -> list[str]:
    """Apply tools in the first process alone, and return its errors."""
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_PATIENCE", timedelta(seconds=2))
        for make in (TOOLS["dynamic"], TOOLS["fp8"], Gathering):
            model = replicated(mesh)
            x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
            if rank == 0:
                try:
                    with amanda.apply(make()):
                        model(x)
                except amanda.AmandaError as error:
                    errors.append(str(error))
            dist.barrier()
    return errors


def run(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    found = {
        "plain": attention(mesh, Sensitivity),
        **{name: attention(mesh, make) for name, make in TOOLS.items()},
        "rows": of_rows(mesh, rank),
        "partial": {name: partial(mesh, TOOLS[name]) for name in ("static", "dynamic")},
        "masks": masks(rank),
        "alone": alone(mesh, rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def step_of(*values: torch.Tensor) -> float:
    """Return the step of 255 between the ends of values and 0."""
    low, high = min(float(one.min()) for one in values), max(float(one.max()) for one in values)
    return (max(high, 0.0) - min(low, 0.0)) / 255


def test_ranges_are_those_of_whole_values(found: list[dict[str, Any]]) -> None:
    model = Attention()
    with torch.no_grad():
        model(inputs()[0])
    seen = {name: step_of(value) for name, value in model.seen.items()}
    for of_rank in found:
        of_layers = {f"{name}/linear/input": seen["x"] for name in ("query", "key", "value")}
        operands = {f"{ATTENTION}/{name}": seen[name] for name in ("query", "key", "value")}
        wanted = {**of_layers, **operands, "out/linear/input": seen["found"]}
        assert of_rank["static, activations"]["scales"] == pytest.approx(wanted, rel=1e-5)


ATTENTION = "scaled_dot_product_attention"


@pytest.mark.parametrize("name", TOOLS)
def test_outputs_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    wanted = [output for output, _ in called(Attention(), TOOLS[name]())]
    plain = [output for output, _ in called(Attention(), amanda.Tool())]
    for of_rank in found:
        # The layer that sums over heads adds what each process has, and rounds in another order.
        for ours, theirs in zip(of_rank[name]["outputs"], wanted, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        assert of_rank[name]["outputs"][-1] != pytest.approx(plain[-1], abs=1e-6)


def test_processes_communicate_where_they_decide(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, second, third = of_rank["static"]["collectives"]
        plain = of_rank["plain"]["collectives"]
        assert plain == 3 * [1]  # The sum over the heads.
        # Four weights are fetched, then there are seven ranges.
        assert (first - plain[0], second - plain[1], third - plain[2]) == (4, 7, 0)


def test_sensitivity_says_what_it_does_not_measure(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        notes = [note for note in of_rank["plain"]["notes"] if "hold parts" in note]
        layers = {note.partition(" ")[0] for note in notes}
        assert layers == {f"{name}/linear" for name in ("query", "key", "value", "out")}


def test_a_process_may_have_no_rows_or_only_zeros(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        rows = of_rank["rows"]
        for name, count in (("uneven", 3), ("of one", 1)):
            wanted = step_of(inputs()[0].flatten(0, 1)[:count])
            assert list(rows[name].values()) == pytest.approx([wanted])
        # The first run tells nothing, as in one process.
        assert list(rows["zeros"].values()) == pytest.approx([step_of(inputs()[0][0])])


def test_terms_of_a_sum_stay(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for name, about in of_rank["partial"].items():
            (note,) = (note for note in about["notes"] if note.endswith(": they stay"))
            assert "not reduced over processes yet" in note
            assert about["added"] == 0, name
            (steps,) = about["weights"]
            # The weight is quantized, and nothing else.
            assert 0 < max(about["off"]) < 8 * 2 * 4 * max(steps)


def test_a_mask_of_one_process_is_one_in_all(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        # No operand of the sum is quantized.
        assert of_rank["masks"] == ["add adds a mask and is not quantized", "layer/linear"]


def test_a_process_alone_is_told(found: list[dict[str, Any]]) -> None:
    first, second = (of_rank["alone"] for of_rank in found)
    assert second == []
    decided = ["present ranges of linear"] * 2 + ["a value of shape (4, 8) as a whole"]
    assert len(first) == len(decided)
    for error, what in zip(first, decided, strict=True):
        assert "did not come to decide with this one" in error
        assert what in error


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # As in test_fully_sharded.py.
