"""Collectives of two processes, as operators: what tools get, and that they add none."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amanda
from amanda_tools.fingerprint import Fingerprint
from amanda_tools.latency import Latency

PROCESSES, STEPS = 2, 3
#: For how long the second process is busy in each step, in seconds.
BUSY = 0.05


class Seen(amanda.Tool):
    """Notes what collectives get and write."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, Any, Any, Any, list[Any], list[Any]]] = []
        self.ids: list[tuple[str, int]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if "c10d::" in context.op_type or context.op_type == "Redistribute":
            kept: list[Any] = []
            self.ids.append((context.name, context.get_op_id()))
            context.insert_before_op(self.before, observe=True, kept=kept)
            context.insert_after_op(self.after, observe=True, context=context, kept=kept)

    def before(self, *values: Any, kept: list[Any]) -> None:
        kept.append([one.tolist() if type(one) is torch.Tensor else None for one in values])

    def after(self, *values: Any, context: amanda.OpContext, kept: list[Any]) -> None:
        written = [one.tolist() if type(one) is torch.Tensor else None for one in values]
        about = context["type"], context.get("bytes"), context.get("group")
        self.rows.append((context.name, *about, kept.pop(0), written))


def functions() -> list[torch.Tensor]:
    """Call each function once; this process gives its number and one more."""
    rank = dist.get_rank()
    own, other = torch.tensor([1.0 + rank]), 1 - rank
    summed, parts, halves = own.clone(), [torch.zeros(1), torch.zeros(1)], torch.zeros(1)
    dist.all_reduce(summed)
    dist.all_gather(parts, own)
    whole = torch.cat(parts)
    dist.reduce_scatter(halves, list(whole.chunk(2)))
    given = own.clone()
    dist.broadcast(given, 1)
    exchanged = torch.zeros(2)
    dist.all_to_all_single(exchanged, torch.tensor([10.0, 20.0]) + rank)
    received = torch.zeros(1)
    if rank:
        dist.send(own, 0)
    else:
        dist.recv(received, 1)
    swapped = torch.zeros(1)
    both = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, swapped, other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    dist.barrier()
    return [summed, whole, halves, given, exchanged, received, swapped]


def overlapping() -> list[torch.Tensor]:
    """Train with reductions that run while the program goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        works = [dist.all_reduce(one, async_op=True) for one in gradients]
        time.sleep(BUSY * dist.get_rank())
        for work in works:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def sharded() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.to_local() for parameter in model.parameters())]


def flat(original: bool = False) -> list[torch.Tensor]:
    """Train with FSDP1, whose parts of parameters are others in each process."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    options: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
    for number in (0, 2):
        model[number] = FullyShardedDataParallel(model[number], **options)
    model = FullyShardedDataParallel(model, **options)
    return _steps(model)


def original() -> list[torch.Tensor]:
    return flat(original=True)


def halves() -> list[torch.Tensor]:
    """Train with FSDP2 where two modules are one unit, and another one is the rest."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    mesh = init_device_mesh("cpu", (PROCESSES,))
    fully_shard([model[0], model[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _steps(model)


def _steps(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sequence_parallel() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (PROCESSES,)), plan)
    y = model(torch.ones(2, 4))
    y.sum().backward()
    return [y.detach()]


PROGRAMS: list[Callable[[], list[torch.Tensor]]] = [
    *(functions, overlapping, sharded, flat, original, halves, sequence_parallel),
]


def _count(program: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], int]:
    """Return the results of a program, and how many collectives the process group counts."""
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    return program(), group._get_sequence_number_for_group() - before


def run(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    found: dict[str, Any] = {}
    for program in PROGRAMS:
        plain, count = _count(program)
        same, seen = [], Seen()
        looking: list[amanda.Tool] = [Fingerprint(), Latency(warmup=0)]
        for tools in ([seen], looking, [Seen()] if rank else []):
            with amanda.apply(*tools):
                values, now = _count(program)
            equal = all(map(torch.equal, values, plain)) and len(values) == len(plain)
            same.append((equal, now))
        found[program.__name__] = {"count": count, "rows": seen.rows, "ids": seen.ids, "same": same}
    latency = Latency(warmup=0)
    with amanda.apply(latency):
        overlapping()
    result = latency.result()
    found["waiting"] = sum(op.self for op in result.ops if op.waits) / 1e9, result.table().title
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_tools_in_all_processes_or_in_one_change_nothing(
    found: list[dict[str, Any]], program: Callable[[], Any]
) -> None:
    for of_rank in found:
        about = of_rank[program.__name__]
        assert about["count"] > 0
        assert about["same"] == 3 * [[True, about["count"]]]


@pytest.mark.slow
def test_functions(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        own, group = 1.0 + rank, [0, 1]
        rows = [row for row in of_rank["functions"]["rows"] if row[1] not in ("send", "recv")]
        assert rows == [
            ["c10d::all_reduce", "all_reduce", 4, group, [[own]], [[3.0]]],
            ["c10d::all_gather", "all_gather", 8, group, [[own]], [[1.0], [2.0]]],
            ["c10d::reduce_scatter", "reduce_scatter", 8, group, [None], [[2.0 * own]]],
            ["c10d::broadcast", "broadcast", 4, group, [[own]], [[2.0]]],
            [
                *("c10d::all_to_all_single", "all_to_all", 8, group, [[10.0 + rank, 20.0 + rank]]),
                [[10.0 + 10 * rank, 11.0 + 10 * rank]],
            ],
            ["c10d::barrier", "barrier", 0, group, [], []],
        ]
    sent, received = ([row[1:] for row in one["functions"]["rows"]] for one in reversed(found))
    assert [row for row in sent if row[0] in ("send", "recv")] == [
        *(["send", 4, [0, 1], [[2.0]], []], ["send", 4, [0, 1], [[2.0]], []]),
        ["recv", 4, [0, 1], [], [[1.0]]],
    ]
    assert [row for row in received if row[0] in ("send", "recv")] == [
        *(["recv", 4, [0, 1], [], [[2.0]]], ["send", 4, [0, 1], [[1.0]], []]),
        ["recv", 4, [0, 1], [], [[2.0]]],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "gather"),
    [
        ("sharded", "all_gather_into_tensor"),
        # FSDP1 keeps the weights of a module as one flat parameter, or as views of it.
        *(("flat", "all_gather"), ("original", "all_gather")),
    ],
)
def test_reductions_of_shards_are_seen_in_forward_and_backward_passes(
    found: list[dict[str, Any]], program: str, gather: str
) -> None:
    for of_rank in found:
        rows = of_rank[program]["rows"]
        # Of float32: weights of 4 x 8 and 8 x 2, and biases.
        sizes = 4 * (4 * 8 + 8), 4 * (8 * 2 + 2)
        gathers = [(name, size) for name, kind, size, *_ in rows if kind == "all_gather"]
        assert gathers[:2] == [
            (f"{layer}/c10d::{gather}", size) for layer, size in zip((0, 2), sizes, strict=True)
        ]
        reduced = [row for row in rows if row[1] == "reduce_scatter"]
        assert [(name, size, group) for name, _, size, group, *_ in reduced[:2]] == [
            (f"{layer}/c10d::reduce_scatter_tensor", size, [0, 1])
            for layer, size in zip((2, 0), reversed(sizes), strict=True)
        ]
        assert len(reduced) == 2 * (1 if program == "sharded" else STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "gather", "forward", "backward"),
    [
        ("flat", "all_gather", ("0", "2"), ("2", "0")),
        ("original", "all_gather", ("0", "2"), ("2", "0")),
        # The parameters of an outermost module stay whole after its forward pass.
        ("sharded", "all_gather_into_tensor", ("0", "2"), ()),
        ("halves", "all_gather_into_tensor", ("", "0"), ("0",)),
    ],
)
def test_what_fsdp_communicates_belongs_to_one_module(
    found: list[dict[str, Any]],
    program: str,
    gather: str,
    forward: tuple[str, ...],
    backward: tuple[str, ...],
) -> None:
    first, second = (of_rank[program]["ids"] for of_rank in found)
    assert first == second
    assert len({number for _, number in first}) == len(first)

    def named(module: str, function: str) -> str:
        return f"{module}/c10d::{function}" if module else f"c10d::{function}"

    names = sorted(name for name, _ in first)
    wanted = [named(module, gather) for module in forward]
    wanted += [named(module, gather) + "#2" for module in backward]
    wanted += [named(module, "reduce_scatter_tensor") for module in forward]
    assert names == sorted(wanted)
    if program != "sharded":
        rows = [row[0] for row in found[0][program]["rows"]]
        assert {rows.count(name) for name in names} == {STEPS}


@pytest.mark.slow
def test_redistributions_have_the_type_of_what_they_do(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        rows = [row for row in of_rank["sequence_parallel"]["rows"] if "Redistribute" in row[0]]
        kinds = [(name.partition("/")[0], kind, size) for name, kind, size, *_ in rows]
        # The input has 2 x 4 elements in each process, of twice as many; the output has 4 x 2.
        assert [one for one in kinds if one[1] != "identity"] == [
            ("0", "all_gather", 4 * 4 * 4),
            ("2", "all_reduce", 4 * 4 * 2),
        ]


@pytest.mark.slow
def test_waiting_is_apart(found: list[dict[str, Any]]) -> None:
    (waited, title), (busy, _) = (of_rank["waiting"] for of_rank in found)
    # The processes do not begin a step at once.
    assert waited > 0.5 * STEPS * BUSY
    assert waited > busy
    assert "in collectives, waiting included" in title


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # As in test_fully_sharded.py.
