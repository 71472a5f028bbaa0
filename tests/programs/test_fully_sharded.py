"""Training in two processes with sharded weights (FSDP2), which exist as a whole for a moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

import amanda
from amanda_tools.prune import Prune

PROCESSES, STEPS = 2, 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(12, 4))


def train(model: nn.Module, rank: int = 0, stride: int = 1) -> None:
    """Train with every `stride`-th sample of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = (torch.randn(8, n, generator=samples)[rank::stride] for n in (12, 4))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_sharded(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    try:
        model: Any = network()
        mesh = init_device_mesh("cpu", (PROCESSES,))
        for block in model[:3]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tool = Prune(0.5)
        with amanda.apply(tool):
            train(model, rank, PROCESSES)
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if rank == 0:
            names = [weight.name for weight in tool.result().weights]
            torch.save((whole, names, tool.result().unreached), folder / "trained")
    finally:
        torch.distributed.destroy_process_group()


def pruned_by_torch() -> Iterator[tuple[str, torch.Tensor]]:
    model = network()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]
    train(model)
    for name, value in model.named_parameters():
        yield name.removesuffix("_orig"), value.detach()


@pytest.mark.slow
def test_a_network_that_is_trained_in_shards_is_pruned_as_a_whole_one(tmp_path: Path) -> None:
    # This file is their program: a package of tests cannot be imported there.
    commands = [[sys.executable, __file__, str(rank), str(tmp_path)] for rank in range(PROCESSES)]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(120) == 0
    whole, names, unreached = torch.load(tmp_path / "trained")
    expected, untrained = dict(pruned_by_torch()), network().state_dict()
    assert whole.keys() == expected.keys()
    assert names == [name for name in expected if name.endswith("weight")]
    assert unreached == []
    for name, value in whole.items():
        assert not torch.equal(value, untrained[name])
        # The two processes' gradients are added in another order.
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)


if __name__ == "__main__":
    train_sharded(int(sys.argv[1]), Path(sys.argv[2]))
    # Gloo's threads outlive the process group. One that frees a tensor while the interpreter
    # finalizes aborts the process (pytorch/pytorch#179291).
    os._exit(0)
