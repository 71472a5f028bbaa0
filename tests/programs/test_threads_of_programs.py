"""Programs that run their model in threads of their own, under `amanda run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = """
import torch
from torch import nn
from concurrent.futures import ThreadPoolExecutor

model = nn.Linear(4, 4)
model(torch.ones(1, 4))
with ThreadPoolExecutor(4) as pool:
    answer = lambda _: model(torch.full((1, 4), float("nan")))
    print(len(list(pool.map(answer, range(100)))), "requests")
"""


@pytest.mark.slow
def test_a_server_that_answers_in_a_pool(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, "-m", "amanda", "run", "-t", "nonfinite", "-t", "trace"]
    done = subprocess.run(
        [*command, "-o", "out", "server.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "100 requests\n"
    assert "without tools" not in done.stderr
    traced = json.loads((tmp_path / "out/trace.json").read_text())["ops"]
    assert {op["name"]: op["calls"] for op in traced} == {"ones": 1, "linear": 101, "full": 100}
    (fault,) = json.loads((tmp_path / "out/nonfinite.json").read_text())["faults"]
    assert (fault["name"], fault["origin"]) == ("full", "constant")
