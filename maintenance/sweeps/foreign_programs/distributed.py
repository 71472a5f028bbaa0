"""Programs with several processes."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from maintenance.sweeps.foreign import Note

from .catalog import EPOCH, EPOCH_BACKWARD, WRITTEN, net, program, samples, train


def _rank() -> int:
    return torch.distributed.get_rank()


@program("DDP over gloo", EPOCH, EPOCH_BACKWARD, processes=2)
def distributed(note: Note) -> None:
    """Train each rank on its own samples with averaged gradients."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(3)
    model = DistributedDataParallel(net())
    torch.manual_seed(_rank())
    train(note, model, DataLoader(samples(), 4))


@program("DDP: accumulation without synchronisation, buffers, unused parameters", processes=2)
def accumulating(note: Note) -> None:
    """Use `no_sync`, batch norm's buffers, and a branch that only one rank takes."""
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
    """Train with parameters sharded over two processes."""
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


@program(
    "FSDP2: made on meta, to_empty, to",
    processes=2,
    left_alone=dict.fromkeys(("narrow", "view"), WRITTEN),
)
def deferred(note: Note) -> None:
    """Shard before memory is allocated, as in FSDP2's example, and convert under tools."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model: Any = net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * number)
    model.to(torch.float64).to(torch.float32)
    features = torch.ones(4, 6)
    loss = model.eval()(features).square().mean()
    loss.backward()
    note("loss", loss)
    note("gradients", [parameter.grad.to_local() for parameter in model.parameters()])


@program("DTensor: in place, redistribute, to", processes=2)
def placed(note: Note) -> None:
    """Write tensors over two processes in place, and move them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    weight: Any = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    weight.add_(1).mul_(2)
    weight.clamp_(max=9)
    note("written", weight.to_local())
    note("whole", weight.redistribute(mesh, [Replicate()]).to_local())
    leaf: Any = nn.Parameter(weight.detach().clone())
    (leaf * leaf).sum().backward()
    with torch.no_grad():
        leaf.add_(leaf.grad, alpha=-0.1)
    note("trained", [leaf.to_local(), leaf.grad.to_local()])
    model = distribute_module(net().eval(), mesh)
    model.to(torch.float64).to(torch.float32)
    result: Any = model(distribute_tensor(torch.ones(2, 6), mesh, [Replicate()]))
    note("module", result.to_local())
