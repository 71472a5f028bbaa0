"""Gradients of parameters before and after their reduction over two processes, as two operators."""

# mypy: allow-untyped-calls
# Much of torch.distributed is not annotated.

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import amanda
from amanda_driver_torch.execution import reductions
from amanda_driver_torch.torch_internals.extension import native
from amanda_tools.nonfinite import NonFinite

PROCESSES, STEPS, MICRO_BATCHES = 2, 2, 2
NODES = range(20)


class Seen(amanda.Tool):
    """Notes the gradients of parameters, and doubles those that have been reduced if asked."""

    def __init__(self, factor: float = 0) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.factor = factor
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type not in ("AccumulateGrad", "ReduceGrad"):
            return
        context.insert_before_backward_op(self.note, observe=True, context=context)
        if self.factor and context["backward_type"] == "reduce_grad":
            context.insert_before_backward_op(self.scaled)

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor

    def note(self, gradient: Any, context: amanda.OpContext) -> None:
        keys = ("rank", "world_size", "group", "mesh", "placements", "micro_batch")
        self.rows.append(
            {
                "name": context.name,
                "id": context.get_op_id(),
                "type": context["backward_type"],
                "value": _local(gradient).flatten().tolist(),
                **{key: context[key] for key in keys if key in context},
            }
        )


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return local


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 3, generator=generator) for _ in range(STEPS * MICRO_BATCHES)]


def ddp(**options: Any) -> Any:
    return nn.parallel.DistributedDataParallel(network(), **options)


def hooked() -> Any:
    """Return a model whose hook of the user reduces the gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = ddp()
    model.register_comm_hook(None, allreduce_hook)
    return model


def fsdp1(original: bool = True) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    options: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
    model = network()
    model[0] = FullyShardedDataParallel(model[0], **options)
    return FullyShardedDataParallel(model, **options)


def fsdp2() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = network(), init_device_mesh("cpu", (PROCESSES,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


MODELS: dict[str, Callable[[], Any]] = {
    "ddp": ddp,
    "views": lambda: ddp(gradient_as_bucket_view=True),
    "small buckets": lambda: ddp(bucket_cap_mb=1e-5),
    "large buckets": lambda: ddp(bucket_cap_mb=100),
    "unused": lambda: ddp(find_unused_parameters=True),
    "hooked": hooked,
    "compiled": lambda: torch.compile(ddp(), backend="aot_eager"),
    "fsdp1": fsdp1,
    "flat": lambda: fsdp1(original=False),
    "fsdp2": fsdp2,
}


def train(model: Any, set_to_none: bool = True) -> list[list[float]]:
    """Train with two backward passes in each step, of which the second one reduces; return the
    gradients that the optimizer gets.
    """
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number, x in enumerate(batches(dist.get_rank())):
        last = number % MICRO_BATCHES == MICRO_BATCHES - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            model(x).square().sum().backward()
        if last:
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            found += [_local(one).flatten().tolist() for one in gradients]
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return found


def generator_and_critic(tool: Seen) -> None:
    """Train two models, of which one backward pass reaches one and the other one both."""
    first, second = ddp(), nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    x = batches(dist.get_rank())[0]
    y = first(x)
    second(y.detach()).sum().backward()
    tool.rows.append({"name": "second"})
    second(y).sum().backward()


def sharded_late() -> list[str]:
    """Shard a model after a backward pass, and return the ops of reductions before and after it."""
    from torch.distributed.fsdp import fully_shard

    tool, model = Seen(), network()
    with amanda.apply(tool):
        model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
        tool.rows.append({"name": "sharded"})
        fully_shard(model)
        model(torch.ones(2, 3)).sum().backward()
    return [row["name"] for row in tool.rows if "Accumulate" not in row["name"]]


def refused() -> str:
    """Return the error of a tool that replaces a reduction."""

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "ReduceGrad":
            context.replace_backward_op(lambda gradient: gradient)

    tool, model = amanda.Tool(), ddp()
    tool.add_inst_for_op(analyse, backward=True)
    with amanda.apply(tool):
        loss = model(torch.ones(2, 3)).sum()
        try:
            loss.backward()
        except amanda.AmandaError as error:
            return str(error)
    return ""


def faults(rank: int) -> list[tuple[str, str, int]]:
    """Train with an infinite sample in the second process, in the second step, and return what is
    said of it.
    """
    tool, model = NonFinite(), ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(tool):
        for step in range(3):
            x = torch.ones(2, 3)
            if rank == step == 1:
                x[0, 0] = float("inf")
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [(fault.origin, fault.what, fault.step) for fault in tool.result().faults]


def compared() -> list[int]:
    """Return how many gradients are looked at in each pass, of a model of which two get none."""
    tool, found = amanda.Tool(), []
    tool.add_inst_for_op(lambda context: None, backward=True)
    model = network()
    model.register_module("unused", nn.Linear(1, 1))
    model.forward = lambda x: model[2](model[0](x))  # type: ignore[method-assign]
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    noted = reductions.Reductions.begin

    def begin(self: reductions.Reductions) -> None:
        noted(self)
        found.append(sum(id(one) in self._gradients for one in model.parameters()))

    with pytest.MonkeyPatch.context() as patch, amanda.apply(tool):
        patch.setattr(reductions.Reductions, "begin", begin)
        for _ in range(3):
            wrapped(torch.ones(2, 3)).sum().backward()
            wrapped.zero_grad()
    return found


def remaining() -> list[int]:
    """Return how many dicts of hooks there are in addition on the nodes of a model: while a tool
    is applied that looks at nothing, after one that acts, and after another pass.
    """
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in NODES)))

    def dicts() -> int:
        gc.collect()
        return sum(type(one) is OrderedDict and not one for one in gc.get_objects())

    def passes() -> None:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            model.zero_grad()

    passes()
    before, found = dicts(), []
    idle = amanda.Tool()
    idle.add_inst_for_op(lambda context: None, backward=True)
    with amanda.apply(idle):
        passes()
        found.append(dicts() - before)
    with torch.inference_mode(), amanda.apply(idle):
        model.module(torch.ones(1, 2))
    with FakeTensorMode(), amanda.apply(idle):
        torch.ones(1)
    acting = Seen()
    with amanda.apply(acting):
        passes()
    assert len(acting.rows) == 3 * 4 * len(NODES)
    found.append(dicts() - before)
    passes()
    return [*found, dicts() - before]


def joined_late(rank: int) -> list[Any]:
    """Apply a tool in the middle of a step, while another one looks at nothing, and return the
    micro-batches at which it sees reductions.
    """
    idle, late, model = amanda.Tool(), Seen(), ddp()
    idle.add_inst_for_op(lambda context: None, backward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(idle):
        for step in range(5):
            for number in range(MICRO_BATCHES):
                last = number == MICRO_BATCHES - 1
                with nullcontext() if last else model.no_sync():
                    loss = model(batches(rank)[number]).sum()
                with amanda.apply(late) if step == 3 and last else nullcontext():
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [row["micro_batch"] for row in late.rows if "Reduce" in row["name"]]


def run(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        plain = train(make())
        tool = Seen()
        with amanda.apply(tool):
            model = make()
            seen = train(model)
        with amanda.apply(edits := Seen(factor=0.5)):
            halved = train(make())
        with amanda.apply(amanda.Tool()):
            idle = train(make(), set_to_none=False)
        found[name] = {
            "plain": plain,
            "seen": seen,
            "halved": (halved, [row for row in edits.rows if row["type"] == "reduce_grad"]),
            "idle": idle,
            "rows": tool.rows,
        }
    both = Seen()
    with amanda.apply(both):
        generator_and_critic(both)
    found["two models"] = [row["name"] for row in both.rows if "Accumulate" not in row["name"]]
    found["faults"], found["refused"] = faults(rank), refused()
    found["compared"], found["remaining"] = compared(), remaining()
    found["sharded late"], found["joined late"] = sharded_late(), joined_late(rank)
    static = Seen()
    with amanda.apply(static):
        model = ddp(static_graph=True)
        for x in batches(rank):
            model(x).sum().backward()
    found["static"] = [row["name"] for row in static.rows if "Accumulate" not in row["name"]]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


NAMES = ["0.weight", "0.bias", "2.weight"]
#: Models of which a rank has the whole gradient of each parameter.
WHOLE = ("ddp", "views", "small buckets", "large buckets", "unused", "hooked", "compiled")


def expected() -> list[list[dict[str, torch.Tensor]]]:
    """Return each rank's own gradient in each backward pass, from one process without tools."""
    model, own = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = [batches(rank) for rank in range(PROCESSES)]
    for number in range(STEPS * MICRO_BATCHES):
        of_ranks = []
        for rank in range(PROCESSES):
            loss = model(every[rank][number]).square().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            of_ranks.append(dict(zip(NAMES, gradients, strict=True)))
        own.append(of_ranks)
        for name, parameter in zip(NAMES, model.parameters(), strict=True):
            mean = torch.stack([one[name] for one in of_ranks]).sum(0) / PROCESSES
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        if number % MICRO_BATCHES == MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    return own


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_each_rank_gets_its_own_gradient_before_the_reduction(
    found: list[dict[str, Any]], model: str
) -> None:
    own = expected()
    for rank, of_rank in enumerate(found):
        rows = [row for row in of_rank[model]["rows"] if row["type"] == "accumulate_grad"]
        for name in NAMES:
            values = [row["value"] for row in rows if row["name"] == f"{name}:AccumulateGrad"]
            wanted = [of_pass[rank][name].flatten().tolist() for of_pass in own]
            assert len(values) == len(wanted) == STEPS * MICRO_BATCHES
            for value, gradient in zip(values, wanted, strict=True):
                assert value == pytest.approx(gradient, abs=1e-6)
        assert {(row["rank"], row["world_size"]) for row in rows} == {(rank, PROCESSES)}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_gradients_after_the_reduction_are_those_of_all_ranks(
    found: list[dict[str, Any]], model: str
) -> None:
    own = expected()
    for name in NAMES:
        by_rank = [
            [row for row in of_rank[model]["rows"] if row["name"] == f"{name}:ReduceGrad"]
            for of_rank in found
        ]
        for step in range(STEPS):
            passes = own[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
            every = [one[name] for of_ranks in passes for one in of_ranks]
            mean = (sum(every) / PROCESSES).flatten().tolist()  # type: ignore[union-attr]
            values = [rows[step]["value"] for rows in by_rank if rows]
            if model in WHOLE:
                assert len(values) == PROCESSES
                for value in values:
                    assert value == pytest.approx(mean, abs=1e-6)
            else:  # The parts of the ranks are the whole, in their order.
                assert [*chain.from_iterable(values)] == pytest.approx(mean, abs=1e-6)
        for rank, rows in enumerate(by_rank):
            assert len(rows) in (0, STEPS)
            assert {row["rank"] for row in rows} <= {rank}
            # The first backward pass of a step, of number 0, reduces nothing.
            assert {row["micro_batch"] for row in rows} <= {1}
            assert all(row["group"] == [0, 1] for row in rows)
            assert all(row.get("placements") in (None, ["S(0)"]) for row in rows)
            assert all((row.get("mesh") == [2]) == (model == "fsdp2") for row in rows)


@pytest.mark.slow
def test_both_operators_have_the_same_ids_under_each_wrapper(found: list[dict[str, Any]]) -> None:
    ids: dict[str, set[int]] = {}
    for of_rank in found:
        for model in MODELS:
            for row in of_rank[model]["rows"]:
                ids.setdefault(row["name"], set()).add(row["id"])
    names = [f"{name}:{kind}" for name in NAMES for kind in ("AccumulateGrad", "ReduceGrad")]
    assert sorted(ids) == sorted(names)
    assert {len(known) for known in ids.values()} == {1}
    assert len(set.union(*ids.values())) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_looking_changes_nothing_and_edits_reach_the_optimizer(
    found: list[dict[str, Any]], model: str
) -> None:
    for of_rank in found:
        about = of_rank[model]
        assert about["seen"] == about["idle"] == about["plain"]
        gradients, rows = about["halved"]
        noted = sorted(0.5 * value for row in rows for value in row["value"])
        assert sorted(value for one in gradients for value in one) == noted


@pytest.mark.slow
def test_a_pass_that_does_not_reach_a_model_does_not_end_its_reduction(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found:
        before, after = [], of_rank["two models"]
        while (name := after.pop(0)) != "second":
            before.append(name)
        assert sorted(before) == ["bias:ReduceGrad", "weight:ReduceGrad"]
        wanted = [*before, *(f"{name}:ReduceGrad" for name in NAMES)]
        assert sorted(after) == sorted(wanted)


@pytest.mark.slow
def test_a_static_graph_reduces_in_each_pass(found: list[dict[str, Any]]) -> None:
    wanted = sorted(f"{name}:ReduceGrad" for name in NAMES * STEPS * MICRO_BATCHES)
    assert [sorted(of_rank["static"]) for of_rank in found] == PROCESSES * [wanted]


@pytest.mark.slow
def test_a_model_may_be_sharded_after_a_backward_pass(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, *others = of_rank["sharded late"]
        assert first == "sharded"
        assert sorted(others) == sorted(f"{name}:ReduceGrad" for name in NAMES)


@pytest.mark.slow
def test_a_tool_that_comes_in_a_step_knows_its_micro_batch(found: list[dict[str, Any]]) -> None:
    expected = len(NAMES) * [MICRO_BATCHES - 1]
    assert [of_rank["joined late"] for of_rank in found] == PROCESSES * [expected]


@pytest.mark.slow
def test_only_parameters_without_gradients_are_looked_at_again(found: list[dict[str, Any]]) -> None:
    assert [of_rank["compared"] for of_rank in found] == PROCESSES * [[5, 2, 2]]


@pytest.mark.slow
@pytest.mark.skipif(native is None, reason="Python cannot remove a hook from a node")
def test_no_hook_stays_on_nodes_that_a_wrapper_keeps(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert all(count < len(NODES) for count in of_rank["remaining"]), of_rank["remaining"]


@pytest.mark.slow
def test_a_reduction_cannot_be_replaced(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "The reduction of a gradient cannot be replaced" in of_rank["refused"]


@pytest.mark.slow
def test_what_another_process_computed_wrong_comes_by_the_reduction(
    found: list[dict[str, Any]],
) -> None:
    first, second = (of_rank["faults"] for of_rank in found)
    assert [(origin, step) for origin, _, step in first] == [("reduction", 1)]
    assert first[0][1] in NAMES
    assert {step for _, _, step in second} == {1}
    assert "reduction" not in {origin for origin, _, _ in second}


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # As in test_fully_sharded.py.
