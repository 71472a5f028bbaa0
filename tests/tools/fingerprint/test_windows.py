"""Fingerprints by module and by step, and of a window of steps and ranks."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from planting import train

import amanda
from amanda_core.cli import main
from amanda_core.errors import ResultError
from amanda_tools.diff import compare_fingerprints
from amanda_tools.fingerprint import Fingerprint, load_fingerprint
from amanda_tools.fingerprint.files import ROWS
from amanda_tools.fingerprint.tool import Level

COARSE: tuple[Level, ...] = ("modules", "steps")


def test_coarser_levels_name_the_step_and_the_module_of_planted_errors(tmp_path: Path) -> None:
    total = len(train(tmp_path / "plain", -1).phases)
    for level in COARSE:
        train(tmp_path / level, -1, level=level)
        train(tmp_path / f"{level} again", -1, level=level)
        equal = compare_fingerprints(tmp_path / level, tmp_path / f"{level} again")
        assert (equal.same, equal.complete, equal.again) == (True, True, "")
    sizes = [(tmp_path / name / ROWS).stat().st_size for name in ("plain", *COARSE)]
    assert sizes[0] > 3 * sizes[1] > 9 * sizes[2]
    chosen = random.Random(3)
    for number in (chosen.randrange(total) for _ in range(6)):
        fine = tmp_path / f"fine {number}"
        planted = train(fine, number).planted
        assert planted is not None
        exact = compare_fingerprints(tmp_path / "plain", fine).first
        assert exact is not None
        for level in COARSE:
            folder = tmp_path / f"{level} {number}"
            train(folder, number, level=level)
            found = compare_fingerprints(tmp_path / level, folder)
            assert found.first is not None
            assert found.first.step == planted.step == exact.step
            assert f"fingerprint:steps={planted.step}" in found.again
            if level == "modules":
                assert (found.first.module, found.first.phase) == (exact.module, exact.phase)
                assert found.first.cause == "operator"
            else:
                assert found.first.cause == "coarse"


@pytest.mark.parametrize("level", COARSE)
def test_what_changes_between_two_applies_is_read_again(tmp_path: Path, level: Level) -> None:
    """Although steps of both have equal numbers, and no write is counted."""
    for name, added in (("one", 0.0), ("other", 1e-3)):
        tool = Fingerprint(folder=tmp_path / name, level=level)
        with amanda.apply(tool):
            value = torch.full((3,), -2.0) * 2
        value.data.add_(added)
        with amanda.apply(tool):
            torch.relu(value)  # It writes zeros in any case.
        tool.result()
    assert not compare_fingerprints(tmp_path / "one", tmp_path / "other").same


@pytest.mark.parametrize("level", COARSE)
@pytest.mark.parametrize("reader", ["weight", "operator"])
def test_gradients_that_no_optimizer_reads_are_recorded(
    tmp_path: Path, level: Level, reader: str
) -> None:
    def program(scale: float) -> None:
        x, weight = torch.ones(2, 3), torch.full((3, 3), 0.5, requires_grad=True)
        for _ in range(2):
            hidden = x @ weight
            hidden.register_hook(lambda gradient: gradient * scale)  # type: ignore[no-untyped-call]
            if reader == "weight":
                torch.autograd.backward(hidden.square().sum())
            else:  # It is not added to a weight.
                (gradient,) = torch.autograd.grad(hidden.square().sum(), weight)
                gradient.relu()
            amanda.step()

    for name, scale in (("one", 1.0), ("other", 1.0), ("wrong", 1.0000001)):
        tool = Fingerprint(folder=tmp_path / name, level=level)
        with amanda.apply(tool):
            program(scale)
        tool.result()
    equal = compare_fingerprints(tmp_path / "one", tmp_path / "other")
    assert (equal.same, equal.complete) == (True, True)
    wrong = compare_fingerprints(tmp_path / "one", tmp_path / "wrong")
    assert wrong.first is not None
    assert wrong.first.step == 0


@pytest.mark.one_interceptor
@pytest.mark.parametrize("level", COARSE)
def test_threads_in_another_order_are_equal(tmp_path: Path, level: Level) -> None:
    tasks = [torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])]

    def program(tasks: list[torch.Tensor]) -> None:
        for task in tasks:
            thread = threading.Thread(target=torch.relu, args=[task])
            thread.start()
            thread.join()

    for name, given in (
        ("one", tasks),
        ("other", tasks[::-1]),
        ("wrong", [tasks[0], tasks[1] + 1]),
    ):
        tool = Fingerprint(folder=tmp_path / name, level=level)
        with amanda.apply(tool, threads="all"):
            program(given)
        tool.result()
    assert compare_fingerprints(tmp_path / "one", tmp_path / "other").same
    wrong = compare_fingerprints(tmp_path / "one", tmp_path / "wrong")
    assert not (wrong.same and wrong.complete)


@pytest.mark.parametrize("level", COARSE)
def test_results_during_the_run_count_nothing_twice(tmp_path: Path, level: Level) -> None:
    def program(tool: Fingerprint, often: bool) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        for layer in layers.parameters():
            torch.nn.init.ones_(layer)
        for step in range(3):
            for _ in range(2):
                layers(torch.full((1, 2), float(step)))
                if often:
                    tool.result()
            amanda.step()

    for often in (False, True):
        tool = Fingerprint(folder=tmp_path / str(often), level=level)
        with amanda.apply(tool):
            program(tool, often)
        tool.result()
    one, other = (load_fingerprint(tmp_path / str(often)) for often in (False, True))
    assert (one.ended, other.ended) == (True, True)
    assert one.rows["digest"].tolist() == other.rows["digest"].tolist()


def test_values_without_a_digest_are_not_said_to_be_equal(tmp_path: Path) -> None:
    for name in ("one", "other"):
        tool = Fingerprint(folder=tmp_path / name, level="modules")
        with amanda.apply(tool):
            torch.sparse.mm(torch.eye(2).to_sparse(), torch.ones(2, 2))
        tool.result()
    found = compare_fingerprints(tmp_path / "one", tmp_path / "other")
    assert (found.same, found.complete) == (True, False)
    assert found.unreadable > 0


def test_a_window_of_steps_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        for step in range(5):
            torch.relu(torch.tensor(float(step)))
            amanda.step()

    monkeypatch.setenv("WORLD_SIZE", "2")
    for run in ("a", "b"):
        for rank in (0, 1):
            monkeypatch.setenv("RANK", str(rank))
            tool = Fingerprint(folder=tmp_path / run / f"rank{rank}", steps=[2, 3], ranks=[1])
            with amanda.apply(tool):
                program()
            notes = tool.result().notes
            assert any("rank 0 was not to be recorded" in note for note in notes) == (rank == 0)
    assert not len(load_fingerprint(tmp_path / "a" / "rank0").rows)
    rows = load_fingerprint(tmp_path / "a" / "rank1").rows
    assert set(rows["step"].tolist()) == {2, 3}
    found = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert (found.same, found.complete) == (True, True)
    assert "In A, rank1, only steps 2 to 3 and ranks 1 were recorded." in found.conclusion()


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level must be of operators, modules, steps, not 'all'"):
        Fingerprint(level="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norms are of single values"):
        Fingerprint(level="steps", norms=True)
    for level in COARSE:
        tool = Fingerprint(folder=tmp_path / level, level=level)
        with amanda.apply(tool):
            torch.relu(torch.ones(2))
        tool.result()
    with pytest.raises(ResultError, match="A is recorded by modules, B by steps"):
        compare_fingerprints(tmp_path / "modules", tmp_path / "steps")


PROGRAM = """
import sys
import torch
x = torch.ones(3)
for step in range(6):
    x = torch.sin(x) * (1.0001 if step == 4 and "--changed" in sys.argv else 1.0)
    torch.relu(x)
    amanda = sys.modules.get("amanda")
    if amanda is not None:
        amanda.step()
"""


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_the_command_that_is_printed_finds_the_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def record(command: list[str], name: str, *arguments: str) -> Path:
        command = [*command[1:-3], "-q", "--no-config", "-o", name, "program.py", *arguments]
        subprocess.run([sys.executable, "-m", "amanda", *command], cwd=tmp_path, check=True)
        return tmp_path / name

    def diff(a: Path, b: Path) -> dict[str, object]:
        with pytest.raises(SystemExit) as caught:
            main(["diff", str(a), str(b), "--json"])
        assert caught.value.code == 1
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    command = shlex.split("amanda run -t fingerprint:level=steps -o FOLDER PROGRAM")
    found = diff(record(command, "a"), record(command, "b", "--changed"))
    again = shlex.split(str(found["again"]))
    assert again[3] == "fingerprint:steps=4"
    found = diff(record(again, "a4"), record(again, "b4", "--changed"))
    first = found["first"]
    assert isinstance(first, dict)
    assert (first["step"], first["cause"], first["op"]) == (4, "operator", "mul")
    again = shlex.split(str(found["again"]))
    found = diff(record(again, "a-values"), record(again, "b-values", "--changed"))
    first = found["first"]
    assert isinstance(first, dict)
    assert (first["step"], first["a"]["name"], first["what"]) == (4, "mul", "output")
