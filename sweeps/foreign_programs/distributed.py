"""Programs of several processes."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch and the libraries leave much untyped.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from sweeps.foreign import Note

from .catalog import EPOCH, EPOCH_BACKWARD, WRITTEN, net, program, samples, train


def _rank() -> int:
    return torch.distributed.get_rank()


@program("DDP over gloo", EPOCH, EPOCH_BACKWARD, processes=2)
def distributed(note: Note) -> None:
    """Each rank trains on its own samples; gradients are averaged."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(3)
    model = DistributedDataParallel(net())
    torch.manual_seed(_rank())
    train(note, model, DataLoader(samples(), 4))


@program("DDP: accumulation without synchronisation, buffers, unused parameters", processes=2)
def accumulating(note: Note) -> None:
    """`no_sync`, batch norm's buffers, and a branch that only one rank takes."""
    from torch.nn.parallel import DistributedDataParallel

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(6, 3), nn.Linear(6, 3), nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.norm(x)
            return self.a(x) if _rank() == 0 else self.b(x)

    torch.manual_seed(3)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(4):
        features = torch.randn(4, 6) + _rank()
        if step % 2 == 0:
            with model.no_sync():
                loss = model(features).square().mean()
                loss.backward()
        else:
            loss = model(features).square().mean()
            loss.backward()
        note.training(model, loss)


@program(
    "FSDP2 on the CPU",
    {"linear": 6, "relu": 3, "cross_entropy_loss": 3},
    {"ReluBackward0": 3},
    processes=2,
    left_alone=dict.fromkeys(("narrow", "chunk", "as_strided", "view"), WRITTEN),
)
def sharded(note: Note) -> None:
    """Parameters sharded over two processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    model: Any = net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(_rank())
    for features, labels in DataLoader(samples(), 4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        note("loss", loss)
        note("shards", [parameter.to_local() for parameter in model.parameters()])
