"""`amanda run` with a real training script, however it ends: output, exit status, results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("train_digits.py")
#: Operators of one forward run of the network, by their common operator types.
FORWARD = ["conv2d", "relu", "conv2d", "relu", "max_pool2d", "reshape", "linear", "relu", "linear"]
#: Steps of one epoch in one process.
STEPS = 46

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

pytestmark = pytest.mark.slow


def python(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    # A variable that the tests themselves may be run with; users are not.
    variables = options.pop("env", os.environ)
    options["env"] = {n: value for n, value in variables.items() if n != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def amanda(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "amanda", "run", *arguments, cwd=cwd)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def calls(path: Path) -> dict[str, int]:
    """Return the number of executions by common type from a trace."""
    found: dict[str, int] = {}
    for op in read(path)["ops"]:
        found[op["word"]] = found.get(op["word"], 0) + op["calls"]
    return found


def test_a_traced_run_is_the_plain_run(tmp_path: Path) -> None:
    plain = python(str(SCRIPT), "--epochs", "2", cwd=tmp_path)
    traced = amanda("-t", "trace", "-o", "out", str(SCRIPT), "--epochs", "2", cwd=tmp_path)
    assert plain.returncode == traced.returncode == 0, traced.stderr
    assert traced.stdout == plain.stdout  # To the last bit of the losses.
    found = read(tmp_path / "out/trace.json")
    assert calls(tmp_path / "out/trace.json")["conv2d"] == 2 * (2 * STEPS + 1)
    words = [found["ops"][index]["word"] for index in found["sequence"]]
    start = words.index("conv2d")
    assert words[start : start + len(FORWARD)] == FORWARD
    (first,) = (op for op in found["ops"] if op["name"] == "features.0/conv2d")
    assert first["inputs"][:2] == ["float32[32,1,8,8]", "float32[16,1,3,3]"]
    assert first["outputs"] == ["float32[32,16,8,8]"]
    assert first["source"].startswith("train_digits.py:") or "conv.py" in first["source"]
    assert "features.0/conv2d" in traced.stderr
    assert str(tmp_path / "out/trace.json") in traced.stderr


@pytest.mark.exhaustive
def test_pruned_training_with_a_trace(tmp_path: Path) -> None:
    tools = ["-t", "prune:sparsity=0.5", "-t", "trace"]
    done = amanda(*tools, "-o", "out", str(SCRIPT), "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"accuracy (\S+)", done.stdout)
    assert accuracy is not None
    assert float(accuracy.group(1)) > 0.7
    weights = read(tmp_path / "out/prune.json")["weights"]
    assert [(w["shape"], w["elements"], w["pruned"]) for w in weights] == [
        ([16, 1, 3, 3], 144, 72),
        ([16, 16, 3, 3], 2304, 1152),
        ([32, 256], 8192, 4096),
        ([10, 32], 320, 160),
    ]
    plain = python(str(SCRIPT), "--epochs", "3", cwd=tmp_path)
    assert done.stdout != plain.stdout  # It does prune.


@pytest.mark.one_interceptor
def test_configured_and_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.amanda]\noutput = "results"\n'
        "[tool.amanda.tools.trace]\n[tool.amanda.tools.prune]\nsparsity = 0.9\n"
        'select = { ops = "linear", modules = "hidden" }\n'
    )
    (tmp_path / "train_digits.py").write_text(SCRIPT.read_text())
    done = amanda("-m", "train_digits", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (weight,) = read(tmp_path / "results/prune.json")["weights"]
    assert (weight["shape"], weight["pruned"]) == ([32, 256], round(0.9 * 8192))
    assert calls(tmp_path / "results/trace.json")["linear"] == 2 * (STEPS + 1)


@pytest.mark.one_interceptor
def test_one_that_raises(tmp_path: Path) -> None:
    plain = python(str(SCRIPT), "--fail", cwd=tmp_path)
    done = amanda("-q", "-t", "trace", "-o", "out", str(SCRIPT), "--fail", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, plain.stdout, plain.stderr)
    assert done.stderr.endswith("ValueError: the training diverged\n")
    assert calls(tmp_path / "out/trace.json")["conv2d"] == 2 * STEPS


@pytest.mark.one_interceptor
def test_one_that_exits(tmp_path: Path) -> None:
    done = amanda("-q", "-t", "trace", "-o", "out", str(SCRIPT), "--exit", "3", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr == ""
    assert calls(tmp_path / "out/trace.json")["conv2d"] == 2 * (STEPS + 1)


@pytest.mark.one_interceptor
def test_one_that_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "amanda", "run", "-t", "trace", "-o", "out"]
    with subprocess.Popen(
        [*command, str(SCRIPT), "--wait"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("rank 0 epoch 0: loss ")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr
    assert "conv2d" in stderr
    assert calls(tmp_path / "out/trace.json")["conv2d"] == 2 * STEPS


@pytest.mark.exhaustive
@pytest.mark.one_interceptor
@pytest.mark.parametrize(("ending", "status"), [([], 0), (["--fail"], 1)])
def test_each_rank_of_torchrun_writes_its_own(
    tmp_path: Path, ending: list[str], status: int
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["-m", "amanda", "run", "-t", "trace", "-o", "out"]
    # Its processes must not listen to a launcher that may have started this one.
    clean = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    done = python(*launcher, *ours, str(SCRIPT), *ending, cwd=tmp_path, env=clean)
    assert done.returncode == status, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} epoch 0: loss " in done.stdout
        assert f"out/rank{rank}/trace.json" in done.stderr
        steps = STEPS // 2 + (not ending)
        assert calls(tmp_path / f"out/rank{rank}/trace.json")["conv2d"] == 2 * steps
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank0", "rank1"]


@pytest.mark.one_interceptor
def test_listing_imports_no_framework(tmp_path: Path) -> None:
    for command in (["--help"], ["tools"], ["drivers"], ["run", "--help"]):
        shown = (
            "import sys\nfrom amanda_core.cli import main\ntry:\n"
            f"    main({command!r})\nfinally:\n    print(*sys.modules, file=sys.stderr)"
        )
        done = python("-c", shown, cwd=tmp_path)
        assert done.returncode == 0
        imported = {*done.stderr.split()}
        assert not {"torch", "tensorflow", "numpy"} & imported
        # A list of tools says which ones cannot be imported, and so imports them.
        assert ("amanda_tools.trace" in imported) == (command == ["tools"])
        assert command != ["tools"] or "Records which operators run" in done.stdout
