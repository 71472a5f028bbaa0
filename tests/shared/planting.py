"""A small GPT that is trained in one process or in several, and a tool that plants an error in it.

Run as a program it trains once for each row of a plan, each into a folder of its own:
`python planting.py FOLDER RANK PROCESSES PLAN`. A plan is a JSON list of the fields of `Trial`.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import amanda
from amanda_tools.fingerprint import Fingerprint
from amanda_tools.fingerprint.tool import Level

STEPS = 2
#: What a training does beyond the plain one.
KINDS = ("plain", "loader", "autocast", "checkpoint", "empty", "compiled")
PHASES = ("forward", "backward", "optimizer", "collective")


@dataclass
class Trial:
    """One training.

    Attributes:
        name: Name of its folder.
        kind: One of `KINDS`.
        rank: Number of the process in which an error is planted; -1 for none.
        phase: Where it is planted: one of `PHASES`.
        draw: Which of the executions in this phase, as a fraction of their number.
    """

    name: str
    kind: str = "plain"
    rank: int = -1
    phase: str = "forward"
    draw: float = 0.0


@dataclass
class Planted:
    """Where an error was planted; in what a collective wrote, the operator that reads it first."""

    op: str
    phase: str
    source: str | None
    step: int
    process: str


class Planting(amanda.Tool):
    """Changes one element of what one execution writes by one unit in the last place.

    Args:
        number: The number of that execution among all of its phase whose results could be changed;
            -1 for none.
        rank: Number of the process.
        phase: One of `PHASES`; an empty text for all together.
        backward: False leaves backward operators alone.
    """

    def __init__(self, number: int, rank: int, phase: str = "", backward: bool = True) -> None:
        super().__init__()
        self.number, self.rank, self.phase = number, rank, phase
        self.step = 0
        self.spared: tuple[str, ...] = ()
        #: The phase of each execution whose result could be changed.
        self.phases: list[str] = []
        self.planted: Planted | None = None
        #: What was planted in the result of a collective, until an operator reads it.
        self.unread: torch.Tensor | None = None
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)
        self.add_inst_for_step(lambda step: setattr(self, "step", step))

    def analyse(self, context: amanda.OpContext) -> None:
        if self.phase == "collective" and not context.module_path:
            context.insert_before_op(self.read, observe=True, context=context)
        if context["type"] == "empty" or context.op_type in self.spared:
            return  # Nothing has written its result yet, or not all of it.
        place = Planted(context.name, "forward", context.source, 0, f"rank{self.rank}")
        zone = "optimizer" if context.zone == "optimizer" else "forward"
        context.insert_after_op(self.plant, observe=True, place=place, phase=zone)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        forward = context.forward
        source = context.source or (forward.source if forward is not None else None)
        place = Planted(context.name, "backward", source, 0, f"rank{self.rank}")
        if self.phase == "collective":
            context.insert_before_backward_op(self.read, observe=True, context=context)
        context.insert_after_backward_op(self.plant, observe=True, place=place, phase="backward")

    def collective(self, name: str, tensor: torch.Tensor) -> None:
        """Plant in what a collective wrote, after it has returned: no operator writes that."""
        place = Planted(name, "collective", None, 0, f"rank{self.rank}")
        with amanda.disabled():
            self.plant(tensor, place=place, phase="collective")

    def read(self, *values: Any, context: amanda.OpContext) -> None:
        """Note the first operator that gets what was planted, which only its value tells."""
        for value in values:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if self.unread is None or not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.dtype == self.unread.dtype and bool((tensor == self.unread).any()):
                    assert self.planted is not None
                    self.planted.op, self.planted.source = context.name, context.source
                    self.unread = None

    def plant(self, *values: Any, place: Planted, phase: str) -> None:
        for value in values:
            tensor = value[0] if isinstance(value, (list, tuple)) and value else value
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if not tensor.numel():
                continue
            self.phases.append(phase)
            same = len(self.phases) if not self.phase else self.phases.count(self.phase)
            if same - 1 == self.number and phase == (self.phase or phase):
                # Without a new version: autograd compares versions of what it saved.
                flat = tensor.data.flatten()
                flat[-1] = torch.nextafter(flat[-1], torch.tensor(math.inf, dtype=flat.dtype))
                tensor.data.copy_(flat.view(tensor.shape))
                place.step = self.step
                self.planted = place
                self.unread = flat[-1] if phase == "collective" else None
            return


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        attention = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        x = x + self.dropout(self.out(attention.transpose(1, 2).flatten(2)))
        changed: torch.Tensor = x + self.mlp(self.norm_2(x))
        return changed


class GPT(nn.Module):
    def __init__(self, kind: str = "plain", words: int = 17, width: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.kind == "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.kind == "empty":  # Half of the memory is read before it is written.
                both = torch.empty(2, *x.shape)
                both[0] = block(x)
                x = both[0] + 0 * both.new_zeros(x.shape)
            else:
                x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def _batches(kind: str) -> Callable[[], torch.Tensor]:
    """Return a function that returns the next batch."""
    if kind != "loader":
        return lambda: torch.randint(0, 17, (2, 7))
    every = TensorDataset(torch.randint(0, 17, (2 * STEPS, 7)))
    rest = iter(DataLoader(every, batch_size=2, shuffle=True, num_workers=2))
    return lambda: next(rest)[0]


def train(
    folder: Path,
    number: int,
    rank: int = 0,
    level: Level = "operators",
    kind: str = "plain",
    phase: str = "",
    backward: bool = True,
) -> Planting:
    """Train for two steps, with an error planted, and record the run."""
    torch.manual_seed(rank)
    random.seed(0)
    torch._dynamo.reset()
    planting = Planting(number, rank, phase, backward)
    if kind == "empty":
        planting.spared = ("__getitem__", "__setitem__")
    tool = Fingerprint(folder=folder, level=level, backward=backward)
    with amanda.apply(tool, planting):
        model: nn.Module = GPT(kind)
        parallel = torch.distributed.is_initialized()
        if parallel:
            model = nn.parallel.DistributedDataParallel(model)
            # DistributedDataParallel refuses a hook whose annotations are texts.
            model.register_comm_hook(planting, lambda state, bucket: _average(state, bucket))
        run = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = _batches(kind)
        for _ in range(STEPS):
            tokens = batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                scores = run(tokens[:, :-1])
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if parallel:
                total = loss.detach() / torch.distributed.get_world_size()
                torch.distributed.all_reduce(total)
                planting.collective("all_reduce", total)
                total.exp()
    tool.result()
    return planting


def _average(planting: Planting, bucket: Any) -> Any:
    """Average the gradients of a bucket over the processes."""
    values = bucket.buffer().div_(torch.distributed.get_world_size())
    torch.distributed.all_reduce(values)
    planting.collective("all_reduce", values)
    done: Any = torch.futures.Future()
    done.set_result(values)
    return done


def run(folder: Path, rank: int, processes: int, trials: list[Trial]) -> None:
    """Train once for each trial; write what was planted beside what was recorded."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes))
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'store {trials[0].name}'}",
        rank=rank,
        world_size=processes,
    )
    phases: dict[tuple[str, bool], list[str]] = {}
    for trial in trials:
        # Compiled training is also recorded without its gradients.
        backward = trial.kind != "compiled" or trial.phase == "backward"
        part, number = folder / trial.name, -1
        if trial.rank == rank:
            known = phases[trial.kind, backward].count(trial.phase)
            number = int(trial.draw * known)
        found = train(
            part / f"rank{rank}",
            number,
            rank,
            kind=trial.kind,
            phase=trial.phase,
            backward=backward,
        )
        if trial.rank < 0:
            phases[trial.kind, backward] = found.phases
        if found.planted is not None:
            (part / "planted.json").write_text(json.dumps(asdict(found.planted)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    plan = [Trial(**one) for one in json.loads(Path(sys.argv[4]).read_text())]
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), plan)
    sys.stdout.flush()
    os._exit(0)  # Threads of gloo may free tensors while the interpreter ends.
