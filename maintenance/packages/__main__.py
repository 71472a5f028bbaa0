"""Build the distributions and check them in fresh environments: `nox -s packages`.

Finds what a checkout cannot show: files that packaging forgets, undeclared requirements, and
whether each distribution works without the others. Creates everything that it needs in a temporary
folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .environments import ROOT, Environment, build
from .publishing import follow

MEMBERS = (
    *("amanda_core", "amanda_tools", "amanda_driver_torch", "amanda_driver_tf"),
    *("amanda_driver_jax", "amanda_driver_mindspore", "amanda_driver_mxnet"),
    "amanda_driver_onnxruntime",
)
TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
model(torch.ones(3, 4)).sum().backward()
print("trained")
"""


def main() -> None:
    """Build, then check each environment."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wheels = root / "wheels"
        scaffolded = list(scaffolds(root))
        for source in [*(ROOT / member for member in MEMBERS), *scaffolded]:
            build(source, wheels)
        for wheel in wheels.glob("*.whl"):
            holds_what_it_should(wheel)
        of_core(Environment(root / "core", wheels), scaffolded[1])
        of_torch(Environment(root / "torch", wheels), scaffolded[0])
        of_the_guide(Environment(root / "guide", wheels))
    print("All well.")


def scaffolds(root: Path) -> Iterator[Path]:
    """Create a tool and a driver with `amanda new`."""
    for kind in ("tool", "driver"):
        command = [sys.executable, "-m", "amanda", "new", kind, "mine", "-o", str(root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield root / f"amanda-{kind}-mine"


def holds_what_it_should(wheel: Path) -> None:
    """Check that a wheel has a type marker, what its pages are made of, and no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("/py.typed") for name in names), wheel
    assert not [name for name in names if name.startswith("tests/")], wheel
    if wheel.name.startswith("amanda_tools"):
        pages = [ROOT / "amanda_tools/src/amanda_tools" / name for name in ("graph", "kit/page")]
        files = [file for page in pages for file in page.rglob("*") if file.is_file()]
        missing = {file.relative_to(pages[0].parents[1]).as_posix() for file in files} - {*names}
        assert not [name for name in missing if "__pycache__" not in name], missing


def of_core(environment: Environment, driver: Path) -> None:
    """Check the core alone, then with a driver that `amanda new` created."""
    (environment.work / "train.py").write_text(TRAIN)
    environment.install("amanda-core")
    said = environment.run("amanda", "tools", status=1)
    assert "pip install 'click>=8.1' 'rich>=13'" in said, said
    environment.install("amanda-core[cli]")
    assert environment.json("drivers") == environment.json("tools") == []
    assert "pip install amanda-driver-<framework>" in environment.run("amanda", "drivers")
    assert "pip install amanda-tools" in environment.run("amanda", "tools")
    said = environment.run("amanda", "run", "-t", "trace", "train.py", status=2)
    assert "No tool 'trace' is installed" in said, said
    assert "pip install amanda-tools" in said, said
    apply = "import amanda\nwith amanda.apply(amanda.Tool()): pass"
    said = environment.run("python", "-c", apply, status=1)
    assert "No working driver is installed" in said, said
    assert "pip install amanda-driver-<framework>" in said, said
    assert environment.json("doctor", status=1)["findings"][0]["severity"] == "error"

    environment.install("amanda-driver-mine[test]")
    assert environment.names("drivers") == ["mine"]
    environment.run("python", "-m", "pytest", "-q", str(driver))
    environment.run("python", "-c", apply)
    environment.uninstall("amanda-driver-mine")
    assert environment.names("drivers") == []


def of_torch(environment: Environment, tool: Path) -> None:
    """Check the core with PyTorch's driver, with tools added and removed, and without the
    driver.
    """
    (environment.work / "train.py").write_text(TRAIN)
    environment.install("amanda-core[cli]", "amanda-driver-torch")
    assert environment.names("drivers") == ["pytorch"]
    own = (
        "import amanda, torch\nseen = []\ntool = amanda.Tool()\n"
        "tool.add_inst_for_op(lambda context: seen.append(context['type']))\n"
        "with amanda.apply(tool): torch.relu(torch.ones(2))\nassert seen[-1] == 'relu', seen\n"
    )
    environment.run("python", "-c", own)
    said = environment.run("python", "-c", "import amanda; amanda.tools", status=1)
    assert "pip install amanda-tools" in said, said

    environment.install("amanda-tool-mine[test]", "amanda-tools")
    assert environment.names("tools") == [
        "capture",
        "dump",
        "effective_path",
        "fingerprint",
        "flops",
        "graph",
        "inject_faults",
        "latency",
        "memory",
        "mine",
        "nonfinite",
        "prune",
        "prune_attention",
        "prune_channels",
        "prune_nm",
        "prune_positions",
        "prune_tiles",
        "quantize",
        "rematerialize",
        "replicas",
        "rewrite",
        "sensitivity",
        "sparsity",
        "steer",
        "summary",
        "trace",
    ]
    assert {found["severity"] for found in environment.json("doctor")["findings"]} <= {"info"}
    said = environment.run("python", "-m", "pytest", "-q", str(tool))
    assert "skipped" not in said, said
    both = ["amanda", "run", "-t", "mine", "-t", "prune:sparsity=0.5", "-o"]
    said = environment.run(*both, "both", "train.py")
    assert "trained" in said, said
    assert sorted(path.name for path in (environment.work / "both").iterdir()) == [
        "mine.json",
        "prune.json",
    ]

    environment.uninstall("amanda-tools")
    assert environment.names("tools") == ["mine"]
    environment.run("amanda", "run", "-t", "mine", "-o", "one", "train.py")
    calls = json.loads((environment.work / "one/mine.json").read_text())["calls"]
    assert calls["0/linear"] == 1, calls
    environment.uninstall("amanda-tool-mine")
    assert environment.names("tools") == []
    environment.run("python", "-c", own)
    environment.uninstall("amanda-driver-torch")
    said = environment.run("python", "-c", own, status=1)
    assert "No working driver is installed" in said, said
    environment.run("python", "-m", "pip", "check")


def of_the_guide(environment: Environment) -> None:
    """Follow the guide to publishing a tool with only the command line installed."""
    environment.install("amanda-core[cli]")
    follow(environment)


if __name__ == "__main__":
    main()
