"""Programs of several ranks: how each wraps the network, and how it trains it."""

# mypy: allow-untyped-calls
# Much of torch.distributed is not annotated.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["PROGRAMS", "Program", "digests", "network", "samples", "steps"]

STEPS, ROWS, WIDTHS = 3, 8, (12, 4)


class _Network(nn.Sequential):
    """Layers one after another, but for one that no program calls."""

    def forward(self, x: Any) -> Any:
        for name, layer in self.named_children():
            x = x if name == "unused" else layer(x)
        return x


def network(width: int = 20) -> nn.Sequential:
    """Return the network of all programs, whose blocks have a width that ranks may divide."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(12), nn.Linear(12, width), nn.GELU(), nn.Linear(width, 12))
        for _ in range(2)
    ]
    return _Network(*blocks, nn.Linear(*WIDTHS))


@cache
def samples() -> list[list[torch.Tensor]]:
    """Return the whole batches."""
    source = torch.Generator().manual_seed(1)
    return [[torch.randn(ROWS, n, generator=source) for n in WIDTHS] for _ in range(STEPS)]


def _batches(rank: int, ranks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for x, y in samples():
        yield x[rank::ranks], y[rank::ranks]


def _sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(
    model: Any,
    rank: int,
    ranks: int,
    optimizer: Callable[[Any], Any] = _sgd,
    parts: int = 1,
    idle: int | None = None,
    evaluates: Callable[[Any, int], Any] = lambda model, rank: model,
) -> list[Any]:
    """Train, and return the loss of each step and of an evaluation after it.

    Args:
        model: The model.
        rank: This rank has every `ranks`-th row of a batch, from this one.
        ranks: Between how many a batch is divided.
        optimizer: Makes the optimizer.
        parts: In how many micro-batches each rank computes, of which only the last one reduces.
        idle: The rank that has a backward pass in the last one alone.
        evaluates: Returns what a rank evaluates; None if it does not.
    """
    updates, found = optimizer(model), []
    for x, y in _batches(rank, ranks):
        for part in range(parts):
            last = part == parts - 1
            with nullcontext() if last else model.no_sync():
                # FSDP1 indexes as well, so that names of `__getitem__` would differ in each rank.
                rows, wanted = (x, y) if parts == 1 else (x[part::parts], y[part::parts])
                loss = (model(rows) - wanted).square().mean() / parts
                if last or rank != idle:
                    loss.backward()
            found.append(loss.item())
        updates.step()
        updates.zero_grad()
        if (evaluated := evaluates(model, rank)) is not None:
            with torch.no_grad():  # Kept results of weights would be read here.
                found.append(evaluated(x).square().sum().item())
    return found


def digests(model: Any) -> list[str]:
    """Return a digest of the part of each parameter that this rank holds."""
    held = [getattr(one, "_local_tensor", one) for one in model.parameters()]
    # LocalTensorMode has the parts of all ranks.
    parts = [part for one in held for part in getattr(one, "_local_tensors", {0: one}).values()]
    whole = [one.detach().float().contiguous().numpy().tobytes() for one in parts]
    return [hashlib.sha256(content).hexdigest() for content in whole]


def _zero(model: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)


def _joined(model: Any, rank: int, ranks: int) -> list[Any]:
    """Train two steps, and as many more as ranks come before this one."""
    optimizer, found = _sgd(model), []
    x, y = next(_batches(rank, ranks))
    with model.join():
        for _ in range(2 + rank):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def _micro_batches(model: Any, rank: int, ranks: int) -> list[Any]:
    """Train the stages of a pipeline with as many micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, ranks, loss_fn=lambda y, wanted: (y - wanted).square().mean())
    optimizer, found = _sgd(model), []
    for x, y in _batches(0, 1):
        losses: list[Any] = []
        last: dict[str, Any] = {"target": y, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*([] if rank else [x]), **last)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
    return found


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def _planes() -> Any:
    """Return a mesh with two dimensions, of which the second one has two ranks."""
    return _mesh(dist.get_world_size() // 2, 2, names=("outer", "inner"))


def _ddp(**options: Any) -> Callable[[Any], Any]:
    return lambda model: nn.parallel.DistributedDataParallel(model, **options)


def _hooked(model: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped = _ddp()(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def _unused(model: Any) -> Any:
    model.unused = nn.Linear(1, 1)
    return _ddp(find_unused_parameters=True)(model)


def _checkpointed(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(model: Any) -> Any:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for number in range(2):
            model[number] = checkpoint_wrapper(model[number])
        return wrap(model)

    return wrapped


def _compiled(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: torch.compile(wrap(model), backend="aot_eager")


def _fsdp1(original: bool) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        options: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
        for number in range(2):
            model[number] = FullyShardedDataParallel(model[number], **options)
        return FullyShardedDataParallel(model, **options)

    return wrap


def _fsdp2(mesh: Callable[[], Any] = _mesh, **options: Any) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        from torch.distributed import fsdp

        more: dict[str, Any] = {"mesh": mesh(), **options}
        if (dtype := more.pop("dtype", None)) is not None:
            more["mp_policy"] = fsdp.MixedPrecisionPolicy(dtype, torch.float32)
        if more.pop("offload", False):
            more["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
        for number in range(2):
            fsdp.fully_shard(model[number], **more)
        return fsdp.fully_shard(model, **more)

    return wrap


def _tensor_parallel(mesh: Callable[[], Any] = _mesh) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        from torch.distributed.tensor import parallel

        plan: Any = {}
        for number in range(2):
            plan[f"{number}.1"] = parallel.ColwiseParallel()
            plan[f"{number}.3"] = parallel.RowwiseParallel()
        return parallel.parallelize_module(model, mesh(), plan)

    return wrap


def _sequence_parallel(model: Any) -> Any:
    """Divide rows, as those of a sequence, where nothing else is divided."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    rows: Any = {"input_layouts": Shard(0)}
    plan: Any = {
        "": parallel.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False
        ),
        "2": parallel.ColwiseParallel(output_layouts=Replicate(), **rows),
    }
    for number in range(2):
        plan[f"{number}.0"] = parallel.SequenceParallel(sequence_dim=0)
        plan[f"{number}.1"] = parallel.ColwiseParallel(**rows)
        plan[f"{number}.3"] = parallel.RowwiseParallel(
            output_layouts=Shard(0), use_local_output=False
        )
    return parallel.parallelize_module(model, _mesh(), plan)


def _both(model: Any) -> Any:
    """Divide layers over one dimension of a mesh, and shard them over the other one."""
    planes = _planes()
    model = _tensor_parallel(lambda: planes["inner"])(model)
    return _fsdp2(lambda: planes["outer"])(model)


def _stage(model: Any) -> Any:
    """Leave only the layers of this rank, of two stages or four."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    places = [(name, part) for name, part in model.named_modules() if not [*part.children()]]
    for number, (name, _) in enumerate(places):
        if number * ranks // len(places) != rank:
            model.set_submodule(name, nn.Identity())
    return model


class Program(NamedTuple):
    """How a program wraps the network, and what it has in common with one process.

    Attributes:
        wrap: Wraps the network.
        train: Trains it, as `steps` does.
        batch: What this rank has of a batch: a "part", all of it, as the others have ("whole"),
            that of its place in the first dimension of a mesh ("outer"), or what its "stage" gets.
        ids: Whether ids and names are those of one "process", if those in its "modules" are, which
            ranks may have between them, or whether they are the same in all "ranks".
        is_exact: Whether decisions are those of one process, not only the same in all ranks.
        differs: Whether one rank runs operators that the others do not. If a tool refuses there,
            the others wait in a collective of the program until their launcher ends them.
    """

    wrap: Callable[[Any], Any]
    train: Callable[..., list[Any]] = steps
    batch: str = "part"
    ids: str = "process"
    is_exact: bool = True
    differs: bool = False

    def place(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return which rank this is of those between which something is divided."""
        return {"whole": (0, 1), "outer": (rank // 2, ranks // 2)}.get(self.batch, (rank, ranks))


def _with(**options: Any) -> Callable[..., list[Any]]:
    return lambda model, rank, ranks: steps(model, rank, ranks, **options)


#: Name -> program.
PROGRAMS: dict[str, Program] = {
    "DDP": Program(_ddp()),
    "DDP, static graph": Program(_ddp(static_graph=True)),
    "DDP, comm hook": Program(_hooked),
    "DDP, unused parameters": Program(_unused),
    "DDP, checkpointing": Program(_checkpointed(_ddp())),
    "DDP, no_sync": Program(_ddp(), _with(parts=2), ids="modules", is_exact=False),
    "DDP, a rank without a backward pass": Program(
        _ddp(), _with(parts=2, idle=1), ids="modules", is_exact=False
    ),
    "DDP, join with uneven inputs": Program(_ddp(), _joined, ids="modules", is_exact=False),
    "DDP, only rank 0 evaluates": Program(
        _ddp(),
        _with(evaluates=lambda model, rank: None if rank else model.module),
        ids="modules",
        differs=True,
    ),
    "DDP, torch.compile": Program(_compiled(_ddp())),
    "ZeRO": Program(_ddp(), _with(optimizer=_zero)),
    "FSDP1, original parameters": Program(_fsdp1(True)),
    "FSDP1, flat parameters": Program(_fsdp1(False)),
    "FSDP2": Program(_fsdp2()),
    "FSDP2, no reshard": Program(_fsdp2(reshard_after_forward=False)),
    "FSDP2, CPU offload": Program(_fsdp2(offload=True)),
    # Sums and activations are rounded.
    "FSDP2, bf16": Program(_fsdp2(dtype=torch.bfloat16), is_exact=False),
    "FSDP2, checkpointing": Program(_checkpointed(_fsdp2())),
    "FSDP2, replicated and sharded": Program(_fsdp2(_planes)),
    "FSDP2, torch.compile": Program(_compiled(_fsdp2())),
    "tensor parallel": Program(_tensor_parallel(), batch="whole", ids="ranks"),
    "sequence parallel": Program(_sequence_parallel, batch="whole", ids="ranks"),
    "FSDP2 and tensor parallel": Program(_both, batch="outer", ids="ranks"),
    "pipeline": Program(_stage, _micro_batches, batch="stage", ids="modules"),
}
