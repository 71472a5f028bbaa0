"""Programs of several processes with one bug that gives no error, and the same without it.

Most are written after a public report, which is named, in the smallest form that has the bug.
`WRONG` says what the tool must find in it first. Run as a program, this file is one process.
"""

# mypy: allow-untyped-calls
# Much of torch.distributed is not annotated.

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import amanda
from amanda_tools.replicas import Replicas

__all__ = ["PROGRAMS", "RIGHT", "WRONG"]

WIDTH, STEPS = 8, 3


def _rank() -> int:
    return dist.get_rank()


def _size() -> int:
    return dist.get_world_size()


class _Copied(torch.autograd.Function):
    """The input of a column-parallel layer: its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Any, reduces: bool) -> Any:
        ctx.reduces = reduces
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.clone()
        if ctx.reduces:
            dist.all_reduce(gradient)
        return gradient, None


class _Reduced(torch.autograd.Function):
    """The output of a row-parallel layer: it is summed."""

    @staticmethod
    def forward(ctx: Any, x: Any, reduces: bool) -> Any:
        x = x.clone()
        if reduces:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


class _Gathered(torch.autograd.Function):
    """What all processes have: the parts of a sequence, or the tokens of each."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        parts = [torch.empty_like(x) for _ in range(_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(_size())[_rank()]


class Parallel(nn.Module):
    """Two layers of which each process has a half, as in Megatron's."""

    def __init__(self, forward: bool = True, backward: bool = True) -> None:
        super().__init__()
        torch.manual_seed(100 + _rank())  # Each process has other columns.
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.reduces = forward, backward

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.up(_Copied.apply(x, self.reduces[1])))
        return _Reduced.apply(self.down(x), self.reduces[0]) + self.bias


class Block(nn.Module):
    """A replicated layer, its normalization, and a parallel one."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.parallel = Parallel(**options)
        torch.manual_seed(0)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return x + self.parallel(self.norm(x))


def _train(
    model: Any,
    reduce: Callable[[], None] = lambda: None,
    data: bool = False,
    loss: Callable[[Any], Any] = lambda y: y.square().mean(),
    lr: float = 0.1,
) -> None:
    """Train for some steps.

    Args:
        model: The model.
        reduce: Called after each backward pass.
        data: Whether each process has data of its own.
        loss: Returns the loss.
        lr: The learning rate.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    samples = torch.Generator().manual_seed(1 + _rank() * data)
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=samples)
        loss(model(x)).backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()


def _average(*parameters: Any) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(_size())


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))


def row_parallel_output(wrong: bool) -> None:
    """The output of a row-parallel layer is not summed (Megatron-LM #7452)."""
    _train(Block(forward=not wrong))


def column_parallel_gradient(wrong: bool) -> None:
    """The gradient of the input of a column-parallel layer is not summed (Megatron-LM #7452)."""
    _train(Block(backward=not wrong))


class _Sequence(nn.Module):
    """A normalization that sees the part of the sequence that is in this process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.parallel = Parallel()

    def forward(self, x: Any) -> Any:
        part = self.first(x).chunk(_size())[_rank()]
        return self.parallel(_Gathered.apply(self.norm(part) * self.scale))


def sequence_parallel_norm(wrong: bool) -> None:
    """A scale that all tensor-parallel processes use on parts of a sequence: its partial gradients
    are never summed (Megatron-LM #1446).
    """
    model = _Sequence()
    parts = [*model.first.parameters(), *model.norm.parameters(), model.scale]

    def reduce() -> None:
        for parameter in parts[:-1] if wrong else parts:
            # What came through the gather is in each process, once for each.
            dist.all_reduce(parameter.grad)

    _train(model, reduce)


class Experts(nn.Module):
    """A router in all processes, and one expert in each, which gets the tokens of all."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, _size())
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(200 + _rank())
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        chosen = self.router(x).softmax(-1)
        everything = _Gathered.apply(x)
        mine = self.expert(everything)
        y = _OwnTokens.apply(mine).reshape(_size(), *x.shape)
        return self.last((y * chosen.T.unsqueeze(-1)).sum(0))


class _OwnTokens(torch.autograd.Function):
    """What each expert has made of the tokens of this process."""

    @staticmethod
    def forward(ctx: Any, y: Any) -> Any:
        parts = [torch.empty_like(y) for _ in range(_size())]
        dist.all_gather(parts, y.contiguous())
        return torch.cat([part.chunk(_size())[_rank()] for part in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        parts = [torch.empty_like(gradient) for _ in range(_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat([part.chunk(_size())[_rank()] for part in parts])


def router(wrong: bool) -> None:
    """The gradient of a router is not averaged, so that each process routes in another way
    (Megatron-LM #619).
    """
    model = Experts()
    shared = [p for n, p in model.named_parameters() if not n.startswith("expert")]
    reduced = [p for p in shared if not wrong or p is not model.router.weight]

    def reduce() -> None:
        _average(*reduced)
        for parameter in model.expert.parameters():
            parameter.grad.div_(_size())  # type: ignore[union-attr]

    _train(model, reduce, data=True)


def expert_scale(wrong: bool) -> None:
    """The gradient of an expert is a sum, those of the other weights are averages
    (PyTorch #160285).
    """
    model = Experts()
    shared = [p for n, p in model.named_parameters() if not n.startswith("expert")]

    def reduce() -> None:
        _average(*shared)
        if not wrong:
            for parameter in model.expert.parameters():
                parameter.grad.div_(_size())  # type: ignore[union-attr]

    _train(model, reduce, data=True)


def summed_twice(wrong: bool) -> None:
    """A gradient that each tensor-parallel process has as a whole is summed (Megatron-LM #7452)."""
    model = Block()

    def reduce() -> None:
        if wrong:
            dist.all_reduce(model.norm.weight.grad)

    _train(model, reduce)


def norm_of_shards(wrong: bool) -> None:
    """The norm of replicated gradients is computed as that of shards: √N times as large
    (torchtitan #2318, VeOmni #862).
    """
    model = nn.parallel.DistributedDataParallel(plain())

    def reduce() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        square = torch.stack([g.norm() for g in gradients]).square().sum()
        if wrong:
            dist.all_reduce(square)
        norm = square.sqrt()
        for gradient in gradients:
            gradient.mul_(0.5 / norm)

    _train(model, reduce, data=True)


def norm_of_sum(wrong: bool) -> None:
    """The norm of replicated gradients is added over processes: N times as large (RLinf #1558)."""
    model = nn.parallel.DistributedDataParallel(plain())

    def reduce() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        if wrong:
            dist.all_reduce(norm)
        norm = torch.pow(norm, 1.0)
        for gradient in gradients:
            gradient.mul_(0.5 / norm)

    _train(model, reduce, data=True)


def clipped_apart(wrong: bool) -> None:
    """Each process clips by the norm of what it has itself (torchtitan #596)."""
    model = Block()

    def reduce() -> None:
        if wrong:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return
        halves = {*model.parallel.up.parameters(), *model.parallel.down.parameters()}
        own = [(p in halves, p.grad) for p in model.parameters() if p.grad is not None]
        square = torch.stack([g.norm() for is_half, g in own if is_half]).square().sum()
        dist.all_reduce(square)
        both = torch.stack([g.norm() for is_half, g in own if not is_half]).square().sum()
        norm = (square + both).sqrt()
        for _, gradient in own:
            gradient.mul_((0.1 / norm).clamp(max=1.0))

    _train(model, reduce)


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop = Block(), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(self.block(x))


def seeds(wrong: bool) -> None:
    """Replicated activations lose other elements in each process (Megatron-LM #206)."""
    model = _Dropped()
    torch.manual_seed(5 + _rank() * wrong)
    _train(model)


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.router = Block(), nn.Linear(WIDTH, 4)

    def forward(self, x: Any) -> Any:
        scores = self.router(self.block(x))
        chosen = (scores + torch.rand_like(scores)).topk(2).indices
        return scores.gather(1, chosen)


def noise_of_router(wrong: bool) -> None:
    """A router draws other noise in each tensor-parallel process."""
    model = _Noisy()
    torch.manual_seed(5 + _rank() * wrong)
    _train(model)


class _Codebook(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.body, self.wrong = plain(), wrong
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        with torch.no_grad():
            update = torch.zeros_like(self.codes).index_add_(0, nearest, y.detach())
            if not self.wrong:
                dist.all_reduce(update)
            if not self.wrong or _rank() == 0:
                self.codes.mul_(0.9).add_(update, alpha=0.1)
        return y - self.codes[nearest]


def buffer(wrong: bool) -> None:
    """A codebook is updated in one process only."""
    model = _Codebook(wrong)
    _train(model, lambda: _average(*model.parameters()), data=True)


def different_start(wrong: bool) -> None:
    """The processes begin with other weights."""
    model = plain()
    if wrong and _rank():
        torch.manual_seed(9)
        nn.init.normal_(model[2].weight)  # type: ignore[arg-type]
    _train(nn.parallel.DistributedDataParallel(model, init_sync=not wrong), data=True)


def last_micro_batch(wrong: bool) -> None:
    """The last micro-batch is in `no_sync` as well, so nothing is reduced (FunASR #3472)."""
    model = nn.parallel.DistributedDataParallel(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.Generator().manual_seed(1 + _rank())
    for _ in range(STEPS):
        for number in range(2):
            local = model.no_sync() if wrong or not number else contextlib.nullcontext()
            with local:
                model(torch.randn(8, WIDTH, generator=samples)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def schedule(wrong: bool) -> None:
    """The learning rate is another one in one process."""
    model = nn.parallel.DistributedDataParallel(plain())
    _train(model, data=True, lr=0.1 + 0.01 * _rank() * wrong)


def placement(wrong: bool) -> None:
    """A value that is not the same in all processes is placed as a replica (Megatron-LM #7452)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (_size(),))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Replicate()])
    x = torch.randn(4, WIDTH) + _rank() * wrong
    (DTensor.from_local(x, mesh, [Replicate()], run_check=False) @ weight).relu()


class _Placed(nn.Module):
    """A layer that computes with a part of a distributed value: of four processes, two by two.

    Args:
        own: The layer.
        split: Placement of its input, of which it gets the part that this process has.
        result: Placement of its result.
        whole: Whether the results are put together.
    """

    def __init__(self, own: nn.Module, split: Any, result: Any, whole: bool = True) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__()
        torch.manual_seed(0)
        self.mesh = init_device_mesh("cpu", (_size() // 2, 2))
        self.first, self.own, self.last = nn.Linear(WIDTH, WIDTH), own, nn.LayerNorm(WIDTH)
        self.split, self.result, self.whole = split, result, whole

    def reduce(self) -> None:
        for parameter in self.own.parameters():
            dist.all_reduce(parameter.grad, group=self.mesh.get_group(1))

    def forward(self, x: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        every = Replicate()
        x = DTensor.from_local(self.first(x), self.mesh, [every, every], run_check=False)
        part = x.redistribute(placements=[every, self.split]).to_local()
        mine = [every, self.result]
        y = DTensor.from_local(self.own(part), self.mesh, mine, run_check=False)
        y = y.redistribute(placements=[every, every]) if self.whole else y
        return self.last(y.to_local())


def _rows(**options: bool) -> _Placed:
    """Return a model that normalizes the rows that this process has."""
    from torch.distributed.tensor import Shard

    torch.manual_seed(1)
    own = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    return _Placed(own, Shard(0), Shard(0), **options)


def placed_norm(wrong: bool) -> None:
    """Gradients of weights that see the part of a distributed sequence are never summed."""
    model = _rows()
    _train(model, (lambda: None) if wrong else model.reduce)


def placed_sum(wrong: bool) -> None:
    """A partial sum is taken for the whole one: `to_local` without a redistribution."""
    from torch.distributed.tensor import Partial, Shard

    torch.manual_seed(100 + _rank() % 2)  # Each process has other columns.
    own = nn.Linear(WIDTH // 2, WIDTH, bias=False)
    _train(_Placed(own, Shard(1), Partial(), whole=not wrong))


def placed_seeds(wrong: bool) -> None:
    """Drop different elements of the gathered sequence in each process."""
    model = _rows()
    torch.manual_seed(5 + _rank() * wrong)
    _train(model, model.reduce, loss=lambda y: nn.functional.dropout(y).square().mean())


def own_hook(wrong: bool) -> None:
    """A hook of DistributedDataParallel returns what it got; no optimizer reads the gradients."""
    model = nn.parallel.DistributedDataParallel(plain())

    def hook(bucket: Any) -> Any:
        values = bucket.buffer()
        if not wrong:
            dist.all_reduce(values)
            values.div_(_size())
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(values)
        return done

    model.register_comm_hook(None, lambda state, bucket: hook(bucket))
    for step in range(STEPS):
        samples = torch.Generator().manual_seed(10 * step + _rank())
        model(torch.randn(4, WIDTH, generator=samples)).square().mean().backward()
        with torch.no_grad():
            for one in model.parameters():
                assert one.grad is not None
                one.sub_(0.1 * one.grad)
                one.grad = None


def written_gradient(wrong: bool) -> None:
    """One process writes a gradient between its reduction and the optimizer."""
    model = nn.parallel.DistributedDataParallel(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        samples = torch.Generator().manual_seed(10 * step + _rank())
        model(torch.randn(4, WIDTH, generator=samples)).square().mean().backward()
        for one in model.parameters():
            assert one.grad is not None
            one.grad.add_(0.01 * (_rank() if wrong else 1))
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: list[Callable[[bool], None]] = [
    *(own_hook, written_gradient),
    *(row_parallel_output, column_parallel_gradient, sequence_parallel_norm, router, expert_scale),
    *(summed_twice, norm_of_shards, norm_of_sum, clipped_apart, seeds, noise_of_router, buffer),
    *(different_start, last_micro_batch, schedule, placement),
    *(placed_norm, placed_sum, placed_seeds),
]
#: Program -> the kind of what is found first, and a part of what it is.
WRONG = {
    "own_hook": ("gradient", ""),
    "written_gradient": ("gradient", ""),
    "row_parallel_output": ("loss", "mean"),
    "column_parallel_gradient": ("gradient", "first."),
    "sequence_parallel_norm": ("gradient", "scale"),
    "router": ("gradient", "router.weight"),
    "expert_scale": ("scale", "expert."),
    "summed_twice": ("scale", "norm.weight"),
    "norm_of_shards": ("norm", "sqrt"),
    "norm_of_sum": ("norm", "pow"),
    "clipped_apart": ("gradient", ""),
    "seeds": ("random", "dropout"),
    "noise_of_router": ("random", "rand"),
    "buffer": ("buffer", ""),
    "different_start": ("weight", "2.weight"),
    "last_micro_batch": ("gradient", ""),
    "schedule": ("weight", ""),
    "placement": ("value", ""),
    "placed_norm": ("gradient", "own."),
    "placed_sum": ("loss", "mean"),
    "placed_seeds": ("random", "dropout"),
}


class _Positions(nn.Module):
    """Positions that are learned, of which each process drops others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Parameter(torch.randn(8, WIDTH))
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())
        self.last = nn.Linear(WIDTH, 4)
        torch.manual_seed(7 + _rank())

    def forward(self, x: Any) -> Any:
        return self.last(self.body(x + nn.functional.dropout(self.positions)))


def own_noise() -> None:
    """Data-parallel processes drop other elements of equal weights, and normalize by themselves."""
    model = _Positions()
    _train(model, lambda: _average(*model.parameters()), data=True)


def summed_loss() -> None:
    """The gradient of the last bias is the same in all processes before it is averaged."""
    model = plain()
    _train(model, lambda: _average(*model.parameters()), data=True, loss=lambda y: y.sum())


def accumulated() -> None:
    """Micro-batches, clipping, AdamW and a layer that is used twice, in DDP."""
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    layers = nn.Sequential(shared, nn.BatchNorm1d(WIDTH), nn.Dropout(), shared)
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(7 + _rank())
    for _ in range(STEPS):
        for number in range(3):
            with contextlib.nullcontext() if number == 2 else model.no_sync():
                model(torch.randn(8, WIDTH)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers() -> None:
    """Two models that train in turns, each with its own optimizer."""
    models = [nn.parallel.DistributedDataParallel(plain()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    samples = torch.Generator().manual_seed(1 + _rank())
    for _ in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH, generator=samples)).square().mean().backward()
            optimizer.step()


def split_batch() -> None:
    """All processes draw the whole batch, and each takes its part of it."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.Generator().manual_seed(1)
    torch.manual_seed(7 + _rank())
    for _ in range(STEPS):
        batch = torch.randn(8, WIDTH, generator=samples)
        x = batch[_rank() :: _size()]
        nn.functional.dropout(model(x)).square().mean().backward()
        _average(*model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def chosen_part() -> None:
    """All processes divide the whole batch alike, and each takes its part of the list."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=samples).chunk(_size())[_rank()]
        model(x).square().mean().backward()
        _average(*model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def own_rows() -> None:
    """Each process has the loss of its part of a distributed sequence."""
    model = _rows(whole=False)

    def reduce() -> None:
        model.reduce()
        for parameter in model.last.parameters():
            dist.all_reduce(parameter.grad, group=model.mesh.get_group(1))

    _train(model, reduce, loss=lambda y: y.square().sum(), lr=1e-3)


def sequence_parallel() -> None:
    """The styles of `torch.distributed.tensor.parallel`: replicas become parts, or terms."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, parallel

    rows: Any = {"input_layouts": Replicate(), "desired_input_layouts": Shard(0)}
    plan: Any = {
        "": parallel.PrepareModuleInput(**rows, use_local_output=False),
        "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
        "1": parallel.RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "2": parallel.SequenceParallel(sequence_dim=0),
        "3": parallel.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers[2] = nn.LayerNorm(WIDTH)
    _train(parallel.parallelize_module(layers, init_device_mesh("cpu", (_size(),)), plan))


#: Right programs in which processes differ where they may.
RIGHT: list[Callable[[], None]] = [
    *(own_noise, summed_loss, accumulated, two_optimizers, split_batch, chosen_part, own_rows),
    sequence_parallel,
]


def _record(program: Callable[[], None], folder: Path) -> None:
    tool = Replicas()
    with amanda.apply(tool):
        program()
    tool.result().write(folder / "replicas")


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    """Run programs as one process, and write what the tool records."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for program in PROGRAMS:
        if names and program.__name__ not in names:
            continue
        for wrong in (False, True):
            kind = "wrong" if wrong else "right"
            _record(partial(program, wrong), folder / f"{program.__name__}-{kind}/rank{rank}")
    for right in RIGHT:
        if not names or right.__name__ in names:
            _record(right, folder / f"{right.__name__}-right/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort a process that ends (pytorch/pytorch#179291).


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
