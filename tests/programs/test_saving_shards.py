"""Models of which two processes hold parts, saved by tools as one."""

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
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import amanda
from amanda_core.errors import AmandaError
from amanda_tools.faults import InjectFaults
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize
from amanda_tools.steer import Steer

PROCESSES = 2
TOOLS: dict[str, Callable[[], BakingTool]] = {
    "prune": lambda: Prune(0.5),
    "quantize": lambda: Quantize(activations="none"),
    "dynamic": lambda: Quantize("dynamic", activations="none", weights="int4"),
    "steer": lambda: Steer("scale", factor=2.0, ops=["linear"], value="inputs", operand=1),
    "faults": lambda: InjectFaults(["linear"], site="weight", rate=0.1, bits="mantissa"),
}
FILES = ("weights", "state", "integers/model")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Rows of which one process has more than the other.
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


class Even(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sharded(kind: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    if kind == "tensor":
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(Even().eval(), mesh, plan)
    model = Net().eval()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save(kind: str, rank: int, folder: Path) -> None:
    """Save the same model as two processes hold it, under each tool."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    found: dict[str, Any] = {}
    for name, make in TOOLS.items():
        model, tool = sharded(kind), make()
        with amanda.apply(tool), torch.no_grad():
            model(torch.ones(3, 6))
        try:
            files = tool.save_baked(folder / name)
        except AmandaError as error:
            found[name] = str(error)
            continue
        assert bool(files) == (rank == 0)
        tool.bake(model)
        found[name] = {key: whole(value) for key, value in model.state_dict().items()}
    torch.save(found, folder / f"found{rank}")
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo frees tensors from threads of its own.


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize("kind", ["sharded", "tensor"])
def test_a_model_of_two_processes_is_saved_as_that_of_one(kind: str, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    # This file is their program: a package of tests cannot be imported there.
    commands = [
        [sys.executable, __file__, kind, str(rank), str(tmp_path)] for rank in range(PROCESSES)
    ]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(200) == 0
    first, second = (torch.load(tmp_path / f"found{rank}") for rank in range(PROCESSES))
    for name, make in TOOLS.items():
        model, tool = (Net if kind == "sharded" else Even)().eval(), make()
        with amanda.apply(tool), torch.no_grad():
            model(torch.ones(3, 6))
        if isinstance(first[name], str):
            # These tools do not change tensor parallel weights, or not in one way for all.
            assert (kind, name) != ("tensor", "prune")
            assert kind == "tensor", first[name]
            assert first[name] == second[name]
            assert not (tmp_path / name).exists()
            continue
        tool.save_baked(tmp_path / "one" / name)
        for file in FILES:
            own = tmp_path / "one" / name / f"{file}.safetensors"
            assert own.exists() == (tmp_path / name / f"{file}.safetensors").exists()
            if own.exists():
                expected = load_file(own)
                saved = load_file(tmp_path / name / f"{file}.safetensors")
                assert saved.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(saved[key], value), (name, file, key)
        tool.bake(model)
        for key, value in model.state_dict().items():
            assert torch.equal(first[name][key], value), (name, key)
            assert torch.equal(second[name][key], value), (name, key)


if __name__ == "__main__":
    save(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
