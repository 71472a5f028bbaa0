"""The tool under `amanda run`: found by name, options as text, files in the output folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .frameworks import FRAMEWORKS

pytest.importorskip("click")

PROGRAMS = {
    "torch": "import torch\ntorch.relu(torch.tensor([-1.0, 2.0]))\n",
    "tinytape": "import tinytape\ntinytape.relu(tinytape.Tensor([-1.0, 2.0]))\n",
}


def amanda(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "amanda", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_tool_is_listed(tmp_path: Path) -> None:
    assert "activation_ranges" in amanda(tmp_path, "tools").stdout


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name in FRAMEWORKS])
def test_amanda_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name], encoding="utf-8")
    tool = "activation_ranges:percentiles=[10,90],bins=5,types=[relu]"
    amanda(tmp_path, "run", "-t", tool, "-o", "out", "program.py")
    written = {path.name: path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"ranges.csv", "ranges.png", "histograms.png"} <= set(written)
    (report,) = [path for name, path in written.items() if name.endswith(".json")]
    (found,) = json.loads(report.read_text(encoding="utf-8"))["ranges"]
    assert (found["lowest"], found["highest"]) == (0.0, 2.0)
    assert set(found["percentiles"]) == {"10", "90"}
    assert len(found["counts"]) == 5
