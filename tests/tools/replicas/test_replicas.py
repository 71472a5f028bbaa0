"""Bugs of parallel programs that give no error, the same programs without them, and what is known
of each process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import parallel_programs
import pytest
import torch
from commands import exit_status
from parallel_programs import PROGRAMS, RIGHT, WRONG
from torch import nn

import amanda
from amanda_core.errors import ResultError
from amanda_tools.fingerprint.files import GRADIENT, SKETCH, load_fingerprint
from amanda_tools.replicas import Replicas, ReplicasReport, compare_replicas
from amanda_tools.replicas.tool import AT_STEP, OWN, sketch_of

pytestmark = pytest.mark.one_interceptor
NAMES = [program.__name__ for program in PROGRAMS]


def run(folder: Path, ranks: int, names: list[str]) -> None:
    """Run programs in several processes, right and wrong."""
    folder.mkdir(exist_ok=True)
    kept = {name: v for name, v in os.environ.items() if name != "RANK"}
    command = [sys.executable, parallel_programs.__file__]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), str(folder), *names], env=kept)
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(300) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()


def check_right(folder: Path, name: str) -> None:
    """Check that values were compared in a right program, and are equal."""
    right = compare_replicas(folder / f"{name}-right")
    assert (right.violations, right.missing) == ([], []), f"{name}: {right.conclusion()}"
    assert right.same
    assert right.complete
    assert right.values > 0


def check(folder: Path, name: str, ranks: int) -> ReplicasReport:
    """Check that nothing is found in the right program, and return what is in the wrong one."""
    check_right(folder, name)
    wrong = compare_replicas(folder / f"{name}-wrong")
    assert wrong.first is not None
    kind, what = WRONG[name]
    assert (wrong.first.kind, what in wrong.first.what) == (kind, True), str(wrong.first)
    assert len(wrong.processes) == ranks
    return wrong


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what two processes have recorded of a few programs."""
    folder = tmp_path_factory.mktemp("sample")
    run(folder, 2, ["sequence_parallel_norm", "norm_of_shards", "seeds"])
    return folder


@pytest.mark.parametrize("name", ["sequence_parallel_norm", "norm_of_shards", "seeds"])
def test_sample_of_bugs(sample: Path, name: str) -> None:
    found = check(sample, name, 2).first
    assert found is not None
    assert (found.step, found.processes) == (0, ["rank0", "rank1"])
    if name == "norm_of_shards":
        assert found.factor == pytest.approx(2**0.5, rel=1e-5)
        line = parallel_programs.__file__, "        norm = square.sqrt()"
        number = Path(line[0]).read_text().splitlines().index(line[1]) + 1
        assert found.source is not None
        assert found.source.endswith(f"parallel_programs.py:{number}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_bug_is_found_and_no_right_program_is_reported(tmp_path: Path, ranks: int) -> None:
    run(tmp_path, ranks, [])
    assert WRONG.keys() == {*NAMES}
    for program in RIGHT:
        check_right(tmp_path, program.__name__)
    found = {name: check(tmp_path, name, ranks).first for name in NAMES}
    for name, factor in (("norm_of_sum", ranks), ("summed_twice", ranks), ("expert_scale", ranks)):
        first = found[name]
        assert first is not None
        assert first.factor == pytest.approx(factor, rel=1e-3)


def test_command_line(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("diff", sample / "seeds-right") == 0
    assert "equal bit for bit" in capsys.readouterr().out
    assert exit_status("diff", sample / "seeds-wrong") == 1
    assert "draw other random numbers" in capsys.readouterr().out
    assert exit_status("diff", sample / "seeds-wrong", "--json") == 1
    content = json.loads(capsys.readouterr().out)
    assert content["format"] == "amanda.replicas_report/1"
    assert content["violations"][0]["processes"] == ["rank0", "rank1"]
    assert exit_status("diff", sample) == 3
    assert "no record of the tool replicas" in capsys.readouterr().err


def test_a_missing_process_is_named_and_not_passed_over(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample / "seeds-right", tmp_path / "run")
    lines = tmp_path / "run" / "rank1" / "replicas" / "ops.jsonl"
    kept = [line for line in lines.read_text().splitlines(True) if '"end"' not in line]
    lines.write_text("".join(kept))
    assert not compare_replicas(tmp_path / "run").complete
    assert exit_status("diff", tmp_path / "run") == 2
    shutil.rmtree(tmp_path / "run" / "rank1")
    with pytest.raises(ResultError, match="several processes"):
        compare_replicas(tmp_path / "run")


def test_weights_without_a_digest_are_not_called_equal(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter((value * torch.eye(3)).to_sparse(), requires_grad=False)
            self.dense = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.dense(torch.sparse.mm(self.weight, x))
            return result

    for rank in (0, 1):
        torch.manual_seed(0)
        tool, model = Replicas(), Sparse(1.0 + rank)
        with amanda.apply(tool), torch.no_grad():
            model(torch.ones(3, 3))
        tool.result().write(tmp_path / f"rank{rank}" / "replicas")
    found = compare_replicas(tmp_path)
    assert (found.same, found.complete, found.weights) == (True, False, 2)
    assert found.missing == [
        f"rank{rank} has 1 weights and gradients without a digest" for rank in (0, 1)
    ]
    assert exit_status("diff", tmp_path) == 2


def test_no_gradients_are_a_note(sample: Path, tmp_path: Path) -> None:
    found = compare_replicas(sample / "seeds-right")
    assert found.compared["gradients"] > 0
    assert f"{found.compared['gradients']} gradients" in found.conclusion()
    assert not found.notes
    tool, model = Replicas(), nn.Linear(5, 3)
    with amanda.apply(tool):
        model(torch.randn(4, 5)).sum().backward()
    for rank in (0, 1):
        tool.result().write(tmp_path / f"rank{rank}" / "replicas")
    found = compare_replicas(tmp_path)
    assert (found.same, found.compared["gradients"]) == (True, 0)
    assert "No gradients were compared" in found.conclusion()


def test_records_that_are_empty_or_malformed(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample / "seeds-right", tmp_path / "run")
    folder = tmp_path / "run" / "rank1" / "replicas"
    rows, lines = (folder / "rows.bin").read_bytes(), (folder / "ops.jsonl").read_text()
    (folder / "rows.bin").write_bytes(b"")
    found = compare_replicas(tmp_path / "run")
    assert found.same
    assert not found.complete
    assert exit_status("diff", tmp_path / "run") == 2
    assert (found.values, found.weights) == (0, 0)
    assert "nothing was compared" in found.conclusion()
    (folder / "rows.bin").write_bytes(rows)
    for broken in ('"groups":3', '"processes":"a"', '"replicated":[1]'):
        (folder / "ops.jsonl").write_text(f'{lines}{{"about":{{{broken}}}}}\n')
        with pytest.raises(ResultError, match="malformed"):
            compare_replicas(tmp_path / "run")
    assert exit_status("diff", sample / "seeds-right", "--rtol", "0.1") == 3


def test_weights_that_may_differ_are_named_by_patterns(sample: Path, tmp_path: Path) -> None:
    """A pattern makes a replica a shard, and a shard a replica."""
    shutil.copytree(sample / "seeds-right", tmp_path / "run")
    for rank in (0, 1):
        lines = tmp_path / "run" / f"rank{rank}" / "replicas" / "ops.jsonl"
        text = lines.read_text().replace('"replicated":[]', '"replicated":["*.up.weight"]')
        lines.write_text(text.replace('"sharded":[]', '"sharded":["*.first.*"]'))
    found = compare_replicas(tmp_path / "run")
    assert found.first is not None
    assert found.first.what == "weight 'block.parallel.up.weight'"
    before = compare_replicas(sample / "seeds-right").weights
    assert found.weights == before - 2 + 1


def test_gradients_are_those_of_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tool, sums = Replicas(), {}
    with amanda.apply(tool):
        for _ in range(2):  # Two micro-batches.
            model(torch.randn(4, 5)).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[f"Sequential:{name}"] = parameter.grad.clone().numpy()
        optimizer.step()
    tool.result().write(tmp_path)
    found = load_fingerprint(tmp_path)
    rows = found.rows[found.rows["what"] == GRADIENT]
    norms = {found.ops[row["op"]].name: float(row["norm"]) for row in rows}
    assert norms == {
        name: pytest.approx(float((value**2).sum() ** 0.5), abs=1e-6)
        for name, value in sums.items()
    }
    sketches = found.rows[found.rows["what"] == SKETCH]
    for name, value in sums.items():
        own, after = (
            [
                (row["norm"], row["largest"])
                for row in sketches[sketches["position"] == at]
                if found.ops[row["op"]].name == name
            ]
            for at in (OWN, AT_STEP)
        )
        assert len(own) == 2
        assert [sum(x) for x in zip(*own, strict=True)] == pytest.approx(
            after[0], rel=1e-4, abs=1e-6
        )
        assert after[0] == pytest.approx(sketch_of(value), rel=1e-4, abs=1e-6)


def test_a_process_has_no_difference_from_itself(tmp_path: Path) -> None:
    tool = Replicas()
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5))
    with amanda.apply(tool):
        model(torch.randn(4, 5)).sum().backward()
    for rank in (0, 1):
        tool.result().write(tmp_path / f"rank{rank}" / "replicas")
    found = compare_replicas(tmp_path)
    assert found.same
    assert found.weights == 2
