"""Reductions by `DistributedDataParallel` over two processes, as operators: one for each bucket."""

# mypy: allow-untyped-calls
# Much of torch.distributed is not annotated.

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import amanda
from amanda_tools.graph import GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.trace import Trace

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

PROCESSES, STEPS = 2, 3
OPERATOR, KEY = "c10d::allreduce_", "Autograd"
#: A cap under which each layer of the network is a bucket.
SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-5}


class Seen(amanda.Tool):
    """Notes what collectives get and write, and halves one of the two if asked."""

    def __init__(self, halves: str = "") -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.halves = halves
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context["type"] not in ("all_reduce", "broadcast"):
            return
        given: list[Any] = []
        context.insert_before_op(self.before, observe=True, given=given)
        context.insert_after_op(self.after, observe=True, context=context, given=given)
        if self.halves and context.get("bucket") is not None:
            insert = getattr(context, f"insert_{self.halves}_op")
            insert(lambda bucket: bucket / 2)

    def before(self, *values: Any, given: list[Any]) -> None:
        # Several tensors are one input.
        tensors = values[0] if isinstance(values[0], list) else values
        given.append([one.flatten().tolist() for one in tensors])

    def after(self, *values: torch.Tensor, context: amanda.OpContext, given: list[Any]) -> None:
        keys = ("type", "group", "bytes", "bucket")
        about = {key: context.get(key) for key in keys}
        about["waits"] = context["wait"] >= 0
        about |= {"name": context.name, "id": context.get_op_id(), "given": given.pop(0)}
        self.rows.append(about | {"written": [one.flatten().tolist() for one in values]})


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def ddp(layers: nn.Module | None = None, **options: Any) -> Any:
    return nn.parallel.DistributedDataParallel(layers or network(), **options)


def hooked() -> Any:
    def hook(_, bucket):  # type: ignore[no-untyped-def]  # Annotations have to be torch's classes.
        work = dist.all_reduce(bucket.buffer().div_(PROCESSES), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model = ddp(**SMALL)
    model.register_comm_hook(None, hook)
    return model


def built_in() -> Any:
    model = ddp(**SMALL)
    kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
    model._register_builtin_comm_hook(kinds.ALLREDUCE)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "one bucket": ddp,
    "small buckets": lambda: ddp(**SMALL),
    "views": lambda: ddp(gradient_as_bucket_view=True, **SMALL),
    "unused": lambda: ddp(find_unused_parameters=True, **SMALL),
    "static": lambda: ddp(static_graph=True, **SMALL),
    "hook": hooked,
    "built-in hook": built_in,
    "buffers": lambda: ddp(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), **SMALL),
    "compiled": lambda: torch.compile(ddp(), backend="aot_eager"),
}


def train(make: Callable[[], Any], accumulates: bool = False) -> tuple[list[Any], int, list[int]]:
    """Train; return losses and gradients, how many collectives the process group counts, and the
    sizes of the last buckets by torch's own account.
    """
    group: Any = dist.group.WORLD
    torch.manual_seed(0)  # Of the layers that `make` makes.
    model, found = make(), list[Any]()
    before = group._get_sequence_number_for_group()
    source = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        last = not accumulates or step == STEPS - 1
        with nullcontext() if last else model.no_sync():
            loss = model(torch.randn(5, 3, generator=source)).square().sum()
            loss.backward()
        found += [loss.item(), *(one.grad.flatten().tolist() for one in model.parameters())]
        if last:
            optimizer.step()
            optimizer.zero_grad()
    count = group._get_sequence_number_for_group() - before
    logged = getattr(model, "_orig_mod", model)._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return found, count, [int(one) for one in sizes.split(",")]


def two_models(tool: Seen) -> None:
    """Let one backward pass reach two models that reduce."""
    first, second = ddp(**SMALL), ddp(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        second(first(torch.ones(2, 3))).sum().backward()
    for row in tool.rows:
        row["of"] = "second" if row["bytes"] == 2 * 4 else "first"


def run(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        plain = train(make)
        with amanda.apply(seen := Seen()):
            watched = train(make)
        with amanda.apply(Seen()) if rank else nullcontext():
            alone = train(make)
        found[name] = {"plain": plain, "same": [watched, alone], "rows": seen.rows}
        found[name]["not seen"] = list(seen.not_seen())
        for halves in ("before", "after") if name != "compiled" else ():
            try:
                with amanda.apply(Seen(halves)):
                    found[name][halves] = train(make)[0]
            except amanda.AmandaError as error:
                found[name][halves] = str(error)
    with amanda.apply(some := Seen()):
        train(MODELS["small buckets"], accumulates=True)
    found["no_sync"] = [row["name"] for row in some.rows if row["type"] == "all_reduce"]
    analysed, idle = list[str](), amanda.Tool()
    idle.add_inst_for_op(lambda context: analysed.append(context.name))
    with amanda.apply(idle):
        train(MODELS["static"])
    found["analysed"] = [name for name in analysed if name.startswith("reduction of bucket")]
    with amanda.apply(both := Seen()):
        two_models(both)
    reduced = [row for row in both.rows if row["type"] == "all_reduce"]
    found["two models"] = [(row["of"], row["name"], row["id"]) for row in reduced]
    tools: dict[str, Any] = {"latency": Latency(warmup=0), "trace": Trace(), "memory": Memory()}
    tools["graph"] = GraphTracing()
    with amanda.apply(*tools.values()):
        train(MODELS["small buckets"])
        found["kernel"] = [torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, KEY)]
    found["kernel"].append(torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, KEY))
    found["tools"] = {name: _names(tool) for name, tool in tools.items()}
    timed = [op for op in tools["latency"].result().ops if op.name.startswith("reduction")]
    found["timed"] = [(op.name, op.calls, op.waits) for op in timed]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # As in test_fully_sharded.py.


def _names(tool: Any) -> list[str]:
    graphs = getattr(tool, "graphs", {}).values()
    every = [op for graph in graphs for op in graph.ops] if graphs else tool.result().ops
    return sorted({one.name for one in every if one.name.startswith("reduction")})


@pytest.mark.parametrize("model", MODELS)
def test_tools_in_all_processes_or_in_one_change_and_send_nothing(
    found: list[dict[str, Any]], model: str
) -> None:
    for of_rank in found:
        about = of_rank[model]
        assert about["same"] == 2 * [about["plain"]]
        assert about["not seen"] == []


@pytest.mark.parametrize("model", MODELS)
def test_each_bucket_has_what_the_process_gives_and_what_all_have(
    found: list[dict[str, Any]], model: str
) -> None:
    by_rank = [
        [one for one in of_rank[model]["rows"] if one["type"] == "all_reduce"] for of_rank in found
    ]
    buckets = [[one for one in rows if one["bucket"] is not None] for rows in by_rank]
    assert [one["id"] for one in by_rank[0]] == [one["id"] for one in by_rank[1]]
    losses_and_gradients = found[0][model]["plain"][0]
    each = len(losses_and_gradients) // STEPS
    # torch makes other buckets after the first pass, or after the second one of a static graph,
    # which its account does not tell.
    begin = max(place for place, one in enumerate(buckets[0]) if one["bucket"] == 0)
    sizes = [one["bytes"] for one in buckets[0][begin:]]
    assert model == "static" or sizes == found[0][model]["plain"][2]
    for first, second in zip(*buckets, strict=True):
        assert first["name"] == f"reduction of bucket {first['bucket']}"
        assert first["group"] == [0, 1]
        assert first["waits"]
        assert first["written"] == second["written"]
        total = torch.tensor(first["given"]) + torch.tensor(second["given"])
        assert torch.equal(total, torch.tensor(first["written"]))
    last = sorted(value for one in buckets[0][begin:] for value in one["written"][0])
    gradients = losses_and_gradients[-each + 1 :]
    assert last == sorted(value for one in gradients for value in one)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "compiled"])
def test_edits_are_sent_or_reach_the_optimizer(found: list[dict[str, Any]], model: str) -> None:
    for of_rank in found:
        plain, count = of_rank[model]["plain"][0], len(of_rank[model]["plain"][0]) // STEPS
        wanted = [[value / 2 for value in one] for one in plain[1:count]]
        for halves in ("before", "after"):
            gradients = of_rank[model][halves]
            if model == "hook" and halves == "after":
                assert "hook has gone on with what was reduced" in gradients
            else:
                assert gradients[1:count] == wanted


def test_other_reductions_are_named(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        name = "reduction of the parameters used"
        maps = [row for row in of_rank["unused"]["rows"] if row["name"] == name]
        assert all(row["written"] == [4 * [PROCESSES]] for row in maps)
        assert len(maps) == STEPS


def test_processes_get_the_buffers_of_the_first_one(found: list[dict[str, Any]]) -> None:
    first, second = (
        [row for row in of_rank["buffers"]["rows"] if row["type"] == "broadcast"]
        for of_rank in found
    )
    # Parameters and buffers when the model is wrapped, then the buffers before each pass.
    assert [len(row["given"]) for row in first] == [7, *STEPS * [3]]
    for own, other in zip(first, second, strict=True):
        assert own["given"] == own["written"] == other["written"]
    assert first[-1]["given"] != second[-1]["given"]


def test_passes_that_reduce_nothing_have_none(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["no_sync"] == ["reduction of bucket 0"]


def test_buckets_that_torch_makes_late_are_analysed(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        names = [row["name"] for row in of_rank["static"]["rows"] if row["bucket"] is not None]
        assert of_rank["analysed"] == [*dict.fromkeys(names)]


def test_buckets_belong_to_their_model(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        ops: dict[str, set[tuple[str, int]]] = {}
        for model, *op in of_rank["two models"]:
            ops.setdefault(model, set()).add(tuple(op))
        assert len(ops["first"]) > len(ops["second"]) == 1
        every = [*ops["first"], *ops["second"]]
        assert all(len({op[place] for op in every}) == len(every) for place in (0, 1))
    assert found[0]["two models"] == found[1]["two models"]


def test_tools_have_a_row_for_each_bucket(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        names = of_rank["tools"]["latency"]
        assert names == [f"reduction of bucket {n}" for n in range(len(names))]
        assert len(names) > 1
        assert of_rank["tools"] == dict.fromkeys(("latency", "trace", "memory", "graph"), names)
        assert all(waits for *_, waits in of_rank["timed"])
        assert {name: calls for name, calls, _ in of_rank["timed"]}[names[0]] == STEPS


def test_the_kernel_is_there_while_tools_are(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["kernel"] == [True, False]


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
