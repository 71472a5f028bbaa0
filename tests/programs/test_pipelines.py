"""Pipelines, of which each process computes one stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import amanda
from amanda_tools.gating import PruneChannels
from amanda_tools.prune import Prune, PruneTiles
from amanda_tools.quantize import Quantize

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

PARTS = 2
#: Tools that would decide by what other processes have.
REFUSED: dict[str, Callable[[], amanda.Tool]] = {
    "global": lambda: Prune(0.5, scope="global"),
    "tiles": lambda: PruneTiles(0.5, 2),
    "taylor": lambda: Prune(0.5, score="taylor"),
    "learned": lambda: Quantize(method="lsq"),
    "gates": lambda: PruneChannels(0.5),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


class Gradients(amanda.Tool):
    """Notes the gradient of each weight in each micro-batch, and the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int, list[float]]] = []
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context["backward_type"] == "accumulate_grad":
            context.insert_before_backward_op(self.note, observe=True, context=context)

    def note(self, gradient: torch.Tensor, context: amanda.OpContext) -> None:
        self.rows.append((context.name, context["stage"], gradient.flatten().tolist()))


def train(rank: int, tool: amanda.Tool) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = network()
    model[1 - rank] = nn.Identity()
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=lambda y, wanted: (y - wanted).square().sum())
    x, wanted = torch.arange(16.0).reshape(4, 4), torch.zeros(4, 2)
    with amanda.apply(tool):
        schedule.step(target=wanted) if rank else schedule.step(x)


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found: dict[str, Any] = {}
    train(rank, tool := Gradients())
    found["rows"] = tool.rows
    for name, make in REFUSED.items():
        try:
            train(rank, make())
        except amanda.AmandaError as error:
            found[name] = str(error)
    # No process has sent anything before, so that they still meet.
    train(rank, pruning := Prune(0.5, scope="weight"))
    found["masks"] = sorted(pruning.masks.saved())
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # As in test_fully_sharded.py.


def started(folder: Path, program: str) -> list[Any]:
    """Run a program in two processes; return what each has found."""
    commands = [[sys.executable, __file__, str(rank), str(folder), program] for rank in range(2)]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        assert [process.wait(240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return started(tmp_path_factory.mktemp("run"), "run")


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is tried on Linux")
def test_a_stage_has_its_own_gradients_and_decisions(found: list[Any]) -> None:
    model, x = network(), torch.arange(16.0).reshape(4, 4)
    for part in range(PARTS):
        rows = x.chunk(PARTS)[part]
        # A schedule divides gradients by the number of micro-batches when all are there.
        wanted = torch.autograd.grad(model(rows).square().sum(), list(model.parameters()))
        for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
            stage = int(name[0])
            rows_of = [row for row in found[stage]["rows"] if row[0] == f"{name}:AccumulateGrad"]
            assert [row[1] for row in rows_of] == PARTS * [stage]
            assert rows_of[part][2] == pytest.approx(gradient.flatten().tolist(), rel=1e-4)
    for rank, of_rank in enumerate(found):
        assert of_rank["masks"] == [f"{rank}.weight"]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is tried on Linux")
def test_all_stages_refuse_what_needs_the_others(found: list[Any]) -> None:
    for of_rank in found:
        assert "Other processes may have layers" in of_rank["global"]
        assert "Other processes may have layers" in of_rank["tiles"]
        assert "It is not known which of 2 processes" in of_rank["taylor"]
        assert "would learn other steps in each of 2 processes" in of_rank["learned"]
        assert "Each of 2 processes would train gates" in of_rank["gates"]


class Chunks(amanda.Tool):
    """Notes the stage and the micro-batch of operators and of gradients, beside their values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, str, int | None, int | None, float]] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.is_backward() and context["backward_type"] == "accumulate_grad":
            context.insert_before_backward_op(self.note, observe=True, context=context)
        elif not context.is_backward() and context["type"] in ("linear", "square"):
            context.insert_before_op(self.note, inputs=[0], observe=True, context=context)

    def note(self, value: torch.Tensor, context: amanda.OpContext) -> None:
        where = context.get("stage"), context.get("micro_batch")
        self.rows.append((context.name, context.op_type, *where, float(value.flatten()[0])))


#: Schedule -> how many stages a rank has.
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
}
#: Those that compute the gradients of weights apart from those of inputs, but for the first stage.
APART = ("ScheduleInterleavedZeroBubble",)
CHUNKS, ROWS = 4, 2


def chunks(rank: int, folder: Path) -> None:
    """Pass the number of a micro-batch, from 1 on, through stages that change nothing."""
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    x = torch.arange(1.0, CHUNKS + 1).repeat_interleave(ROWS).unsqueeze(1)
    found = {}
    for name, each in SCHEDULES.items():
        stages = []
        for number in range(rank, 2 * each, 2):
            layer = nn.Linear(1, 1, bias=False)
            nn.init.ones_(layer.weight)
            cpu = torch.device("cpu")
            stages.append(pipelining.PipelineStage(layer, number, 2 * each, cpu))
        schedule = getattr(pipelining, name)(
            stages if each > 1 else stages[0],
            CHUNKS,
            loss_fn=lambda y, _: y.square().sum(),
            scale_grads=False,
        )
        tool = Chunks()
        with amanda.apply(tool):
            for _ in range(2):  # The second time without an analysis.
                schedule.step(*([] if rank else [x]), **({"target": x} if rank else {}))
        found[name] = tool.rows
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is tried on Linux")
def test_operators_and_gradients_have_the_micro_batch_of_the_schedule(tmp_path: Path) -> None:
    for rank, found in enumerate(started(tmp_path, "chunks")):
        for name, each in SCHEDULES.items():
            # What a stage receives is a leaf, too, and has no name of a weight.
            of = [row for row in found[name] if row[1] != "AccumulateGrad" or "weight" in row[0]]
            rows = {kind: [row[2:] for row in of if row[1] == kind] for kind in KINDS}
            stages, numbers = range(rank, 2 * each, 2), 2 * [*range(CHUNKS)]
            # The value tells the micro-batch: the number, or the gradient of its square.
            values = [[stage, n, n + 1] for stage in stages for n in numbers]
            assert sorted(rows["linear"]) == sorted(values), name
            # Weights' gradients that are computed apart are assigned, not accumulated.
            accumulating = [0] * (not rank) if name in APART else stages
            gradients = [
                [stage, n, 2 * ROWS * (n + 1) ** 2] for stage in accumulating for n in numbers
            ]
            assert sorted(rows["AccumulateGrad"]) == sorted(gradients), name
            # The loss is computed between the stages' forward and backward passes.
            assert sorted(rows["square"]) == sorted([None, None, n + 1] for n in numbers * rank)


KINDS = ("linear", "AccumulateGrad", "square")

if __name__ == "__main__":
    {"run": run, "chunks": chunks}[sys.argv[3]](int(sys.argv[1]), Path(sys.argv[2]))
