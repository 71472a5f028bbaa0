"""A small GPT that is trained in one process or in several, and a tool that plants an error in it.

Run as a program it trains once without an error and once with each of some errors:
`python planting.py FOLDER RANK PROCESSES COUNT SEED`.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

import amanda
from amanda_tools.fingerprint import Fingerprint

STEPS = 2


@dataclass
class Planted:
    """Where an error was planted."""

    op: str
    phase: str
    source: str | None
    step: int
    process: str


class Planting(amanda.Tool):
    """Changes one element of what one execution writes by one unit in the last place.

    Args:
        number: The number of that execution among all whose results could be changed; -1 for none.
        rank: Number of the process.
    """

    def __init__(self, number: int, rank: int) -> None:
        super().__init__()
        self.number, self.rank = number, rank
        self.step = 0
        #: The phase of each execution whose result could be changed.
        self.phases: list[str] = []
        self.planted: Planted | None = None
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)
        self.add_inst_for_step(lambda step: setattr(self, "step", step))

    def analyse(self, context: amanda.OpContext) -> None:
        if context["type"] == "empty":
            return  # Nothing has written its result yet.
        place = Planted(context.name, "forward", context.source, 0, f"rank{self.rank}")
        context.insert_after_op(self.plant, observe=True, place=place)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        forward = context.forward
        source = context.source or (forward.source if forward is not None else None)
        place = Planted(context.name, "backward", source, 0, f"rank{self.rank}")
        context.insert_after_backward_op(self.plant, observe=True, place=place)

    def plant(self, *values: Any, place: Planted) -> None:
        for value in values:
            tensor = value[0] if isinstance(value, (list, tuple)) and value else value
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if not tensor.numel():
                continue
            self.phases.append(place.phase)
            if len(self.phases) - 1 == self.number:
                # Without a new version: autograd compares versions of what it saved.
                flat = tensor.data.flatten()
                flat[-1] = torch.nextafter(flat[-1], torch.tensor(math.inf))
                tensor.data.copy_(flat.view(tensor.shape))
                place.step = self.step
                self.planted = place
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
    def __init__(self, words: int = 17, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def train(folder: Path, number: int, rank: int = 0) -> Planting:
    """Train for two steps, with an error planted, and record the run."""
    torch.manual_seed(rank)
    random.seed(0)
    planting, tool = Planting(number, rank), Fingerprint(folder=folder)
    with amanda.apply(tool, planting):
        model: nn.Module = GPT()
        if torch.distributed.is_initialized():
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            tokens = torch.randint(0, 17, (2, 7))
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    tool.result()
    return planting


def run(folder: Path, rank: int, processes: int, count: int, seed: int) -> None:
    """Train plainly twice, and once with each of `count` errors; each in a folder of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=processes
    )
    total = len(train(folder / "plain" / f"rank{rank}", -1, rank).phases)
    train(folder / "again" / f"rank{rank}", -1, rank)
    chosen = random.Random(seed)
    for index in range(count):
        # All processes draw the same.
        where, number = chosen.randrange(processes), chosen.randrange(total)
        part = folder / str(index)
        found = train(part / f"rank{rank}", number if where == rank else -1, rank)
        if found.planted is not None:
            (part / "planted.json").write_text(json.dumps(asdict(found.planted)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    sys.stdout.flush()
    os._exit(0)  # Threads of gloo may free tensors while the interpreter ends.
