"""Figures of two processes, added, are those of one process that has the whole batch."""

# mypy: allow-untyped-calls
# Much of torch.distributed is not annotated.

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import amanda
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.sparsity import Sparsity

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

WIDTH, HIDDEN, BATCH, STEPS = 6, 16, 8, 2
#: The operators of the model, by name. Those of the last layer are in no parallel layer.
LINEAR = ("0/linear", "2/linear")
PROGRAMS = ("DDP", "FSDP2", "tensor parallel")
#: Figure -> operator, or operator and tensor -> its number.
Figures = dict[str, dict[str, int]]


def _model(program: str) -> Any:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 3))
    model = nn.Sequential(*layers)
    if program == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if program == "one":
        return model
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if program == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _figures(program: str, rank: int, ranks: int) -> Figures:
    """Train under the tools, and return figures by tool and operator."""
    if program == "tensor parallel":
        rank, ranks = 0, 1  # Both have the whole batch.
    samples, model = torch.Generator().manual_seed(1), _model(program)
    flops, sparsity, memory, latency = Flops(), Sparsity(), Memory(), Latency(warmup=0)
    with amanda.apply(flops, sparsity, memory, latency):
        for _ in range(STEPS):
            x = torch.randn(BATCH, WIDTH, generator=samples)[rank::ranks]
            model(x).square().mean().backward()
    found: Figures = {"macs": {}, "backward": {}, "zeros": {}, "bytes": {}, "calls": {}}
    for op in flops.result().ops:
        found["macs"][op.name], found["backward"][op.name] = op.macs, op.backward_macs
    for tensor in sparsity.result().tensors:
        if tensor.kind == "output" or tensor.weight:
            name = f"{tensor.name}, {tensor.weight or 'output'}"
            found["zeros"][name], found["zeros"][f"{name} of"] = tensor.zeros, tensor.elements
    for allocated in json.loads(memory.result().to_json())["ops"]:
        found["bytes"][allocated["name"]] = allocated["allocated"]
    for timed in json.loads(latency.result().to_json())["ops"]:
        found["calls"][timed["name"]] = timed["calls"]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Figures]]:
    """Return the figures of both processes by program."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env={**os.environ})
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(200) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    each = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {program: [one[program] for one in each] for program in PROGRAMS}


def _added(each: list[Figures], tool: str) -> Counter[str]:
    return Counter(each[0][tool]) + Counter(each[1][tool])


@pytest.mark.parametrize("program", ["DDP", "FSDP2"])
def test_processes_that_share_a_batch(program: str, found: dict[str, list[Figures]]) -> None:
    """Each computes for its part of the batch, and holds the weights as a whole when it does."""
    one = _figures("one", 0, 1)
    macs = BATCH * STEPS * WIDTH * HIDDEN  # The closed form.
    assert [one["macs"][name] for name in LINEAR] == [macs, macs]
    for tool in ("macs", "backward"):
        assert _added(found[program], tool) == Counter(one[tool])
    zeros = _added(found[program], "zeros")
    for name, count in one["zeros"].items():
        times = 2 if "weight" in name or "bias" in name else 1
        if "mean" not in name:  # Each process has a mean of its own.
            assert zeros[name] == times * count, name
    assert zeros["1/relu, output"] > 0
    allocated = _added(found[program], "bytes")
    for name in (*LINEAR, "1/relu", "3/linear"):
        assert allocated[name] == one["bytes"][name] > 0, name
        for each in found[program]:
            assert each["calls"][name] == one["calls"][name] == STEPS


def test_processes_that_share_layers(found: dict[str, list[Figures]]) -> None:
    """Parallel layers add up to those of one process; others are computed in each."""
    one, each = _figures("one", 0, 1), found["tensor parallel"]
    for tool in ("macs", "backward"):
        added = _added(each, tool)
        for name in LINEAR:
            assert added[name] == one[tool][name] > 0, (tool, name)
        assert added["3/linear"] == 2 * one[tool]["3/linear"] > 0
    zeros, allocated = _added(each, "zeros"), _added(each, "bytes")
    weight = "0/linear, Sequential:0.weight"
    assert zeros[f"{weight} of"] == one["zeros"][f"{weight} of"] == WIDTH * HIDDEN * STEPS
    for name in ("0/linear, output", "1/relu, output"):
        assert zeros[name] == one["zeros"][name], name
        assert zeros[f"{name} of"] == one["zeros"][f"{name} of"], name
    assert allocated["0/linear"] == one["bytes"]["0/linear"] > 0
    # What is a part of a sum has the whole shape in each process.
    assert allocated["2/linear"] == 2 * one["bytes"]["2/linear"] > 0


def main(rank: int, folder: Path) -> None:
    """Run all programs as one process of two."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    figures = {program: _figures(program, rank, 2) for program in PROGRAMS}
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may abort a process that ends (pytorch/pytorch#179291).


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
