"""Tensors that are distributed over processes, and tools in one of them or in all.

To look at a tensor communicates with nobody, and what is decided for a weight is decided once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amanda
from amanda import Tool
from amanda_tools.prune import Prune, PruneNM

#: One process of two, of which the other one does not exist: collectives return at once.
COUNTING = """
import json
import sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
import amanda
from amanda_core.errors import UnsupportedError
from amanda_tools.flops import Flops
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize
from every_tool import EDITING, TOOLS

torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "c10d" in function.namespace:
            self.found += not any(one in str(function) for one in ("wait", "_wrap_tensor"))
        return function(*args, **(kwargs or {}))


def perceptron():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return lambda: model(torch.ones(2, 4)).sum().backward()


def vocabulary():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
    words = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"0": words, "1": ColwiseParallel(output_layouts=Replicate())})
    return lambda: model(torch.tensor([[0, 1, 5]])).sum().backward()


def sequence():
    model = nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5))
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": SequenceParallel()})
    return lambda: model(torch.ones(2, 4, 4)).sum().backward()


def placements():
    part = torch.arange(20.0).reshape(5, 4)
    kinds = Shard(0), Shard(1), Replicate(), Partial(), Partial("avg"), Partial("max")
    values = [DTensor.from_local(part, mesh, [kind], run_check=False) for kind in kinds]
    values.append(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]))
    weights = [nn.Parameter(value) for value in values[:3]]

    def run():
        for value in values:
            (value * 2).relu()
        for weight in weights:
            (weight * 2).to_local().sum().backward()

    return run


def count(program, *tools):
    with Counting() as counting, amanda.apply(*tools):
        program()
        program()
    for tool in tools:
        tool.result()
    return counting.found


found = {}
for make in (perceptron, vocabulary, sequence, placements):
    plain = count(make())
    assert plain or make is sequence
    for name, kind in {**TOOLS, **EDITING}.items():
        found[f"{make.__name__}, {name}"] = count(make(), kind()) - plain
print(json.dumps(found))

flops = Flops()
with amanda.apply(flops):
    perceptron()()
print(json.dumps(flops.result().total.macs))
plain = nn.Linear(4, 4)
quantize = Quantize()
with amanda.apply(quantize):
    plain(torch.ones(2, 4))
print(json.dumps(quantize.result().notes))
try:
    with amanda.apply(Prune(0.5, score="taylor")):
        plain(torch.ones(2, 4))
except UnsupportedError as error:
    print(json.dumps(str(error)))
"""


#: They decide for a weight as a whole, and so fetch it once.
DECIDING = ("prune", "prune_nm", "prune_tiles")


def test_tools_add_no_collective() -> None:
    shared = str(Path(__file__).parents[1] / "shared")
    path = os.pathsep.join(filter(None, [shared, os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", COUNTING],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found, macs, notes, error = map(json.loads, ran.stdout.splitlines()[-4:])
    assert macs == 2 * (4 * 8 + 8 * 4) / 2  # This process's half.
    fetching = {name for name, number in found.items() if number}
    assert fetching == {f"perceptron, {name}" for name in DECIDING} | {
        f"vocabulary, {name}" for name in DECIDING
    }
    assert "ranges of activations are of the data of this process, one of 2" in notes
    assert "It is not known which of 2 processes train the model together" in error


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def tools() -> dict[str, Tool]:
    return {
        "matrix": Prune(0.5),
        "layer": Prune(0.5, scope="layer"),
        "global": Prune(0.5, scope="global"),
        "groups": PruneNM(2, 4),
    }


def gradients(model: nn.Module, tool: Tool) -> list[torch.Tensor]:
    """Return the gradients of the weights in the second step, which are 0 where one is pruned."""
    with amanda.apply(tool):
        for _ in range(2):
            model.zero_grad()
            model(torch.linspace(-1, 1, 16).reshape(2, 8)).square().sum().backward()
            amanda.step()
    found = [getattr(layer, "weight").grad for layer in (model[0], model[2])]  # type: ignore[index]  # noqa: B009
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


def run(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, tool in tools().items():
        model = network()
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        found[name] = gradients(model, tool)
    torch.save(found, folder / f"{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_masks_of_parallel_layers_are_those_of_one_process(tmp_path: Path) -> None:
    commands = [[sys.executable, __file__, str(rank), str(tmp_path)] for rank in range(2)]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(120) == 0
    for name, tool in tools().items():
        expected = gradients(network(), tool)
        assert 128 <= sum(int((one == 0).sum()) for one in expected) < 160, name
        for rank in range(2):
            found = torch.load(tmp_path / f"{rank}")[name]
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours == 0, theirs == 0), (name, rank)
                torch.testing.assert_close(ours, theirs)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # As in test_fully_sharded.py.
