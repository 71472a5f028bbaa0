"""Models of which processes hold parts, saved by tools as one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amanda
from amanda_core.errors import AmandaError
from amanda_tools.faults import InjectFaults
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize
from amanda_tools.steer import Steer

#: How processes hold the model -> how many there are.
PROCESSES = {"sharded": 2, "small": 4, "tensor": 2, "both": 4}
TOOLS: dict[str, Callable[[int], BakingTool]] = {
    "prune": lambda width: Prune(0.5),
    "quantize": lambda width: Quantize(activations="none"),
    "grouped": lambda width: Quantize(
        activations="none", weights="int4", group=2 + width % 2, symmetric=False
    ),
    "dynamic": lambda width: Quantize("dynamic", activations="none", weights="int4"),
    "steer": lambda width: Steer("scale", factor=2.0, **OPERAND),
    "neurons": lambda width: Steer("ablate", neurons=[1, 5], **OPERAND),
    "projected": lambda width: Steer("project", vector=[1.0, *range(width - 1)], **OPERAND),
    "faults": lambda width: InjectFaults(**WEIGHTS, rate=0.1, bits="mantissa"),
    "noise": lambda width: InjectFaults(**WEIGHTS, rate=0.2, model="noise"),
}
OPERAND: Any = {"ops": ["linear"], "value": "inputs", "operand": 1}
WEIGHTS: Any = {"ops": ["linear"], "site": "weight"}
#: What is refused where processes compute with parts of weights, and what is said.
REFUSED = {"projected": "that other processes"}
FILES = ("weights", "state", "integers/model")


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 6)
        self.eval()

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def width_of(kind: str) -> int:
    # Of 9 rows some processes have more than others. Torch itself wants even parts of activations.
    return 8 if kind in ("tensor", "both") else 9


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sharded(kind: str) -> nn.Module:
    model: nn.Module = Net(width_of(kind))
    shape = (2, 2) if kind == "both" else (PROCESSES[kind],)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "parts")[: len(shape)])
    if kind in ("tensor", "both"):
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(model, mesh["parts"] if kind == "both" else mesh, plan)
    if kind != "tensor":
        mesh = mesh["data"] if kind == "both" else mesh
        fully_shard(model.get_submodule("up"), mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def save(kind: str, rank: int, folder: Path) -> None:
    """Save the same model as processes hold it, under each tool."""
    torch.set_num_threads(1)
    store, size = f"file://{folder / 'store'}", PROCESSES[kind]
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    found: dict[str, Any] = {}
    for name, make in TOOLS.items():
        model, tool = sharded(kind), make(width_of(kind))
        try:
            with amanda.apply(tool), torch.no_grad():
                model(torch.ones(3, width_of(kind)))
            files = tool.save_baked(folder / name)
        except AmandaError as error:
            found[name] = str(error)
            continue
        assert bool(files) == (rank == 0)
        tool.bake(model)
        found[name] = {key: whole(value) for key, value in model.state_dict().items()}
    torch.save(found, folder / f"found{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo frees tensors from threads of its own.


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize("kind", PROCESSES)
def test_a_model_of_several_processes_is_saved_as_that_of_one(kind: str, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    # This file is their program: a package of tests cannot be imported there.
    ranks = range(PROCESSES[kind])
    commands = [[sys.executable, __file__, kind, str(rank), str(tmp_path)] for rank in ranks]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(200) == 0
    found = [torch.load(tmp_path / f"found{rank}") for rank in ranks]
    refused = REFUSED if kind in ("tensor", "both") else {}
    for name, make in TOOLS.items():
        saved = tmp_path / name
        if name in refused:
            assert all(refused[name] in one[name] for one in found)
            assert not saved.exists()
            continue
        model, tool = Net(width_of(kind)), make(width_of(kind))
        with amanda.apply(tool), torch.no_grad():
            model(torch.ones(3, width_of(kind)))
        tool.save_baked(tmp_path / "one" / name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        tool.bake(model)
        assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
        for file in FILES:
            own = tmp_path / "one" / name / f"{file}.safetensors"
            assert own.exists() == (saved / f"{file}.safetensors").exists()
            if own.exists():
                expected, values = load_file(own), load_file(saved / f"{file}.safetensors")
                assert values.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(values[key], value), (name, file, key)
        for rank in ranks:
            assert not isinstance(found[rank][name], str), found[rank][name]
            for key, value in model.state_dict().items():
                assert torch.equal(found[rank][name][key], value), (name, key, rank)


PROGRAM = """
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 5))
if sys.argv[1] != "one":
    torch.distributed.init_process_group("gloo")
    fully_shard(model[0])
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 9)).sum().backward()
    optimizer.step()
if sys.argv[1] == "destroyed":
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize("end", ["destroyed", "left"])
def test_the_weights_of_a_run_are_saved_while_its_processes_can_communicate(
    end: str, tmp_path: Path
) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    (tmp_path / "train.py").write_text(PROGRAM)
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    said = {}
    for name, program in {"one": "train.py one", "two": f"{launcher} {end}"}.items():
        command = f"-m amanda run --no-config -t prune:sparsity=0.5,save={name} -o out-{name}"
        arguments = [sys.executable, *command.split(), *program.split()]
        done = subprocess.run(
            arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        said[name] = done.stdout + done.stderr
        assert not done.returncode, said[name]
    assert said["two"].count("the pruned ones are in two") == 1
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in said)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], value) for key, value in two.items())
    assert any((value == 0).any() for value in two.values())


if __name__ == "__main__":
    save(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
