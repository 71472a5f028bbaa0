"""Pipelines, of which each process computes one stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import amanda
from amanda_tools.prune import Prune

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

PARTS = 2


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
    for scope in ("weight", "global"):
        try:
            train(rank, pruning := Prune(0.5, scope=scope))
        except (amanda.AmandaError, RuntimeError) as error:
            found[scope] = str(error)  # The second process waits for the first one, which ends.
        else:
            found[scope] = sorted(pruning.masks.saved())
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # As in test_fully_sharded.py.


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is tried on Linux")
def test_a_stage_has_its_own_gradients_and_decisions(tmp_path: Path) -> None:
    commands = [[sys.executable, __file__, str(rank), str(tmp_path)] for rank in range(2)]
    started = [subprocess.Popen(command) for command in commands]
    assert [process.wait(240) for process in started] == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
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
        assert of_rank["weight"] == [f"{rank}.weight"]
    assert "Other processes may have layers" in found[0]["global"]


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
