"""Training under tools continues in a new process with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

#: Trains from a step to another one, from the files of a folder if there are some.
PROGRAM = """
import sys
from pathlib import Path
import safetensors.torch
import torch
from torch import nn
import amanda
from amanda_tools.gating import PruneChannels, PrunePositions
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize

names, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
TOOLS = {
    "prune": lambda: Prune(0.8, scope="global", steps=6, initial=0.2, every=2),
    "prune_nm": lambda: PruneNM(2, 4),
    "prune_tiles": lambda: PruneTiles(0.6, 4, stages=[0.3], stage_steps=3),
    "quantize": lambda: Quantize("static", "int4", "int4", calibration=2),
    "lsq": lambda: Quantize("lsq", "int4", "int4"),
    "prune_channels": lambda: PruneChannels(0.5),
    "prune_positions": lambda: PrunePositions(0.5, steps=8),
    "taylor": lambda: Prune(0.8, scope="global", steps=6, every=2, score="taylor"),
}

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x)

def train(name):
    tool = TOOLS[name]()
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3), nn.ReLU(), Residual(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4))
    if first:
        model.load_state_dict(safetensors.torch.load_file(folder / f"{name}-model.safetensors"))
        tool.load(folder / f"{name}-tool.safetensors")
    with amanda.apply(tool):
        run(name, tool, model)

def run(name, tool, model):
    if name in ("lsq", "prune_channels", "prune_positions"):
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(2, 4, 8, 8))  # Makes what learns.
        learned = tool.parameters()
    else:
        learned = []
    optimizer = torch.optim.SGD([*model.parameters(), *learned], lr=0.05)
    for step in range(first, last):
        x = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(x).square().mean() + model(x).mean()
        loss.backward()
        optimizer.step()
        print(name, step, loss.item().hex())
    safetensors.torch.save_file(model.state_dict(), folder / f"{name}-model.safetensors")
    tool.save(folder / f"{name}-tool.safetensors")
    for value in [*model.parameters(), *learned]:
        print(name, value.detach().double().sum().item().hex())

for name in names.split(","):
    train(name)
"""
TOOLS = (
    *("prune", "taylor", "prune_nm", "prune_tiles", "prune_channels", "prune_positions"),
    *("quantize", "lsq"),
)
STEPS = 8


def test_a_new_process_continues_with_the_same_bits(tmp_path: Path) -> None:
    def train(folder: str, first: int, last: int) -> dict[str, list[str]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = [sys.executable, "-P", "-c", PROGRAM, ",".join(TOOLS), str(tmp_path / folder)]
        done = subprocess.run(
            [*arguments, str(first), str(last)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        lines = [line.partition(" ") for line in done.stdout.splitlines()]
        return {name: [rest for one, _, rest in lines if one == name] for name in TOOLS}

    whole = train("whole", 0, STEPS)
    begun, continued = train("parts", 0, STEPS // 2), train("parts", STEPS // 2, STEPS)
    for name in TOOLS:
        assert len(continued[name]) > STEPS // 2
        assert begun[name][: STEPS // 2] + continued[name] == whole[name], name
