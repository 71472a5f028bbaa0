"""Fingerprints: digests of what operators read and write, and the operator at which runs part.

Long, since it is a list of cases.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from commands import exit_status
from planting import train
from torch import nn

import amanda
from amanda_core.errors import ResultError
from amanda_tools.diff import compare_fingerprints
from amanda_tools.dump import Dump, load_dump
from amanda_tools.fingerprint import Fingerprint, FingerprintResult, load_fingerprint
from amanda_tools.fingerprint.files import INPUT, OUTPUT, ROWS, UNREADABLE, UNWRITTEN


def recorded(program: Callable[[], object], **options: Any) -> FingerprintResult:
    tool = Fingerprint(**options)
    with amanda.apply(tool):
        program()
    return tool.result()


def digests(program: Callable[[], object]) -> list[int]:
    """Return the digests of what the operators of a program write."""
    rows = recorded(program).open().rows
    found: list[int] = rows[(rows["what"] == OUTPUT) & (rows["flags"] == 0)]["digest"].tolist()
    return found


def training(layers: int = 2, steps: int = 2) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_that_of_the_bytes_in_order(dtype: torch.dtype) -> None:
    made = torch.arange(24).reshape(2, 3, 4)
    value = (made % 2 == 0) if dtype is torch.bool else made.to(dtype)
    for view in (value, value.transpose(0, 2), value[:, 1:], value[1, ::2], value[0, 0, 0]):
        plain = bytes(view.contiguous().flatten().view(torch.uint8).tolist())
        expected = xxhash.xxh3_64_intdigest(plain)
        rows = recorded(partial(torch.clone, view)).open().rows
        assert rows["digest"].tolist()[-2:] == [expected, expected]


def test_values_that_look_alike_are_told_apart() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    values = [
        *(x, x.t().contiguous(), x.flip(0), torch.zeros(2, 2), -torch.zeros(2, 2)),
        *(nans[0], nans[1], x.flatten()[:2], torch.cat([x, x])),
    ]
    found = digests(lambda: [torch.clone(value) for value in values])
    assert len(set(found)) == len(values)
    assert digests(lambda: torch.clone(x)) == digests(lambda: torch.clone(x.clone()))[1:]


def test_sparse_values_are_named_and_not_compared(tmp_path: Path) -> None:
    def program() -> None:
        torch.sparse.mm(torch.eye(2).to_sparse(), torch.ones(2, 2))

    one, other = recorded(program), recorded(program)
    assert one.unreadable > 0
    assert any("sparse" in note for note in one.notes)
    assert (one.open().rows["flags"] & UNREADABLE).any()
    for number, result in enumerate((one, other)):
        result.write(tmp_path / str(number))
    found = compare_fingerprints(tmp_path / "0", tmp_path / "1")
    assert (found.same, found.complete, found.unreadable) == (True, False, one.unreadable)


def test_memory_that_nothing_has_written_is_not_compared(tmp_path: Path) -> None:
    def program(scratch: float) -> None:
        made = torch.empty(64)
        ctypes.memmove(made.data_ptr(), (ctypes.c_float * 64)(*[scratch] * 64), 256)
        view = made.view(8, 8)
        view.fill_(3.0)
        view + 1

    for number in range(2):
        recorded(partial(program, float(number)), folder=tmp_path / str(number))
    found = compare_fingerprints(tmp_path / "0", tmp_path / "1")
    assert (found.same, found.complete, found.unwritten) == (True, True, 4)
    names = [op.name for op in load_fingerprint(tmp_path / "0").ops]
    assert names[-3:] == ["view", "fill_", "add"]


def test_memory_of_which_parts_were_written_is_not_compared(tmp_path: Path) -> None:
    def program(scratch: float, value: float) -> None:
        made = torch.empty(2, 32)
        ctypes.memmove(made.data_ptr(), (ctypes.c_float * 64)(*[scratch] * 64), 256)
        made[0] = torch.full((32,), value)
        torch.relu(made[0])

    for name, arguments in {"a": (0.0, 1.0), "b": (1.0, 1.0), "c": (0.0, 2.0)}.items():
        recorded(partial(program, *arguments), folder=tmp_path / name)
    found = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    # Of `empty`, the assignment, the index and `relu`, but not the row that `relu` wrote.
    assert (found.same, found.complete, found.unwritten) == (True, True, 6), found.conclusion()
    assert found.values == 3
    first = compare_fingerprints(tmp_path / "a", tmp_path / "c").first
    assert first is not None
    assert first.op == "full"


def _filled_by_view(x: torch.Tensor) -> torch.Tensor:
    x[0].fill_(1.0)
    return x


@pytest.mark.parametrize(
    "write",
    {
        "a view": _filled_by_view,
        "put_": lambda x: x.put_(torch.tensor([0]), torch.ones(1)),
        "fill_diagonal_": lambda x: x.fill_diagonal_(1.0),
        "resize_": lambda x: torch.ones(1).resize_(8, 8),
        "slice_scatter": lambda x: torch.slice_scatter(x, torch.ones(1, 8), 0, 0, 1),
        "select_scatter": lambda x: torch.select_scatter(x, torch.ones(8), 0, 0),
        "diagonal_scatter": lambda x: torch.diagonal_scatter(x, torch.ones(8)),
        "pad": lambda x: nn.functional.pad(x, (1, 1)),
        "gather": lambda x: x.gather(0, torch.zeros(1, 8, dtype=torch.int64)),
        "where": lambda x: torch.where(torch.eye(8) > 0, x, 0.0),
        "copy_": lambda x: torch.empty_permuted((8, 8), (1, 0)).copy_(x),
    }.items(),
    ids=lambda write: write[0],
)
@pytest.mark.parametrize("native", [True, False])
def test_parts_that_nothing_has_written_are_followed(
    write: tuple[str, Callable[[torch.Tensor], torch.Tensor]],
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fingerprint, "has_plain_rows", native)
    for make, unwritten in ((torch.empty, True), (torch.zeros, write[0] == "resize_")):
        read, copied = recorded(partial(_copied, make, write[1])).open().rows[-2:]
        assert [bool(row["flags"] & UNWRITTEN) for row in (read, copied)] == [unwritten] * 2


def _copied(make: Callable[..., torch.Tensor], write: Callable[..., torch.Tensor]) -> None:
    write(make(8, 8)).clone()


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
def test_more_outputs_and_items_than_a_row_can_number(
    native: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Fingerprint, "has_plain_rows", native)

    def program(last: float) -> None:
        tokens = torch.arange(66_000.0)
        tokens[-3] = last
        torch.cat(tokens.tensor_split(len(tokens)))

    for name, last in {"a": 1.0, "b": 1.0, "c": 2.0}.items():
        recorded(partial(program, last)).write(tmp_path / name)
    same = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert (same.same, same.complete) == (True, True)
    assert same.values > 2 * 66_000
    parted = compare_fingerprints(tmp_path / "a", tmp_path / "c")
    # What the assignment wrote, what `split` read and wrote of it, and what `cat` did.
    assert parted.different == 5


def test_a_loader_may_make_room_in_any_step(tmp_path: Path) -> None:
    """Workers are ready at other times in each run, and `torch.utils.data` receives what they
    send: it makes an empty tensor, in which there is nothing to compare.
    """
    source = "def receive():\n    return torch.empty(0)\n"
    names: dict[str, Any] = {"__name__": "torch.utils.data.receiving", "torch": torch}
    exec(compile(source, "receiving.py", "exec"), names)

    def program(step: int) -> None:
        for at in range(3):
            torch.relu(torch.full((2,), float(at)))
            if at == step:
                names["receive"]()
            amanda.step()

    for level in ("operators", "modules", "steps"):
        for step in range(2):
            folder = tmp_path / level / str(step)
            recorded(partial(program, step), folder=folder, level=level)
        found = compare_fingerprints(tmp_path / level / "0", tmp_path / level / "1")
        assert (found.same, found.complete) == (True, True), found.conclusion()
    zones = {op.name: op.zone for op in load_fingerprint(tmp_path / "operators" / "0").ops}
    assert zones["empty"] == "data"


def test_equal_runs_are_equal_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = recorded(training), recorded(training)
    assert [s.digest for s in one.steps] == [s.digest for s in other.steps]
    for number, result in enumerate((one, other)):
        result.write(tmp_path / str(number))
    assert exit_status("diff", tmp_path / "0", tmp_path / "1") == 0
    assert "all are equal bit for bit" in capsys.readouterr().out


def test_the_modules_and_steps_that_a_difference_reaches_are_named(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Tanh(), nn.ReLU()

        def forward(self, x: torch.Tensor, planted: float) -> torch.Tensor:
            result: torch.Tensor = self.last(self.first(x) + planted)
            return result

    def program(planted: bool) -> None:
        net = Net()
        for step in range(3):
            net(torch.full((2, 3), 1.0 + step), 1e-3 * (planted and step == 1))
            amanda.step()

    for planted in (False, True):
        with torch.no_grad():
            recorded(partial(program, planted), folder=tmp_path / str(planted))
    found = compare_fingerprints(tmp_path / "False", tmp_path / "True")
    # The sum outside of modules differs, then what the last module reads and writes.
    assert [(one.module, one.step, one.first, one.different) for one in found.spread] == [
        ("", 1, "add", 1),
        ("last", 1, "last/relu", 2),
    ]
    assert found.spread[1].values == 2
    assert sum(one.different for one in found.spread) == found.different
    assert len(found.spread_table().rows) == 2


def test_another_seed_is_named_where_it_matters(tmp_path: Path) -> None:
    def program(seed: int) -> None:
        torch.manual_seed(seed)
        torch.ones(2) * 2
        amanda.step()
        torch.relu(torch.rand(2))

    random.seed(0)
    recorded(partial(program, 3), folder=tmp_path / "a")
    random.seed(1)  # Nothing draws from Python's own generator.
    recorded(partial(program, 3), folder=tmp_path / "same")
    recorded(partial(program, 4), folder=tmp_path / "b")
    same = compare_fingerprints(tmp_path / "a", tmp_path / "same")
    assert (same.same, same.complete) == (True, True)
    first = compare_fingerprints(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.cause, first.op, first.states) == ("state", "rand", ["pytorch cpu"])


def test_other_data_come_from_outside(tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)

    def program(data: torch.Tensor) -> None:
        (data * weight).sum().backward()  # type: ignore[no-untyped-call]

    for number in range(2):
        data = torch.full((3,), float(number))
        recorded(partial(program, data), folder=tmp_path / str(number))
    first = compare_fingerprints(tmp_path / "0", tmp_path / "1").first
    assert first is not None
    assert (first.cause, first.op, first.what[:7]) == ("outside", "mul", "input 0")


def test_a_write_that_nobody_sees_is_named(tmp_path: Path) -> None:
    """Neither NumPy nor `ctypes` counts a write, and a collective need not."""

    def program(change: float) -> None:
        x = torch.ones(4) * 2
        for _ in range(20):
            torch.relu(x)
        x.numpy()[1] += change
        for _ in range(20):
            torch.relu(x)

    recorded(lambda: program(0.0), folder=tmp_path / "a")
    result = recorded(lambda: program(1.0), folder=tmp_path / "b")
    assert [write.producer for write in result.unseen_writes[:1]] == ["mul"]
    first = compare_fingerprints(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.cause, first.producer) == ("writer", "mul")


def test_planted_errors_are_named(tmp_path: Path) -> None:
    """One element of one result is wrong by a unit in the last place: forward, backward, step."""
    counted = train(tmp_path / "plain", -1).phases
    chosen = random.Random(0)
    for index, phase in enumerate(["forward", "forward", "backward", "backward"]):
        number = chosen.choice([n for n, one in enumerate(counted) if one == phase])
        planted = train(tmp_path / str(index), number).planted
        assert planted is not None
        found = compare_fingerprints(tmp_path / "plain", tmp_path / str(index))
        first = found.first
        assert first is not None, planted
        assert (first.op, first.phase, first.source, first.step) == (
            *(planted.op, planted.phase, planted.source),
            planted.step,
        )
        assert first.cause == "operator"
        assert first.what.startswith(("output", "gradient out"))


def test_an_operator_that_only_one_run_has_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(lambda: training(2), folder=tmp_path / "a")
    recorded(lambda: training(2, steps=1), folder=tmp_path / "b")
    assert exit_status("diff", tmp_path / "a", tmp_path / "b") == 2
    said = capsys.readouterr().out
    assert "Only in A: " in said
    assert "the rest was not compared" in said


def test_an_inserted_operator_shifts_nothing(tmp_path: Path) -> None:
    def program(more: bool) -> None:
        x = torch.arange(4.0)
        for _ in range(3):
            x = torch.relu(x) * 2
            if more:
                torch.sigmoid(x)

    recorded(lambda: program(False), folder=tmp_path / "a")
    recorded(lambda: program(True), folder=tmp_path / "b")
    found = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert {one.run for one in found.missing} == {"B"}
    assert all("sigmoid" in one.what for one in found.missing)


class Meeting(amanda.Tool):
    """Lets two threads be inside `relu` at the same time, each before the other ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context["type"] == "relu":
            context.replace_op(self.meet)

    def meet(self, value: torch.Tensor) -> torch.Tensor:
        self.barrier.wait(timeout=30)
        return torch.clamp(value, min=0)


def test_threads_that_take_tasks_in_another_order_are_equal(tmp_path: Path) -> None:
    tasks = [torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0])]

    def in_turn(tasks: list[torch.Tensor]) -> None:
        for task in tasks:
            thread = threading.Thread(target=torch.relu, args=[task])
            thread.start()
            thread.join()

    def at_once(tasks: list[torch.Tensor]) -> None:
        threads = [threading.Thread(target=torch.relu, args=[task]) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    runs: dict[str, tuple[Callable[[list[torch.Tensor]], None], list[torch.Tensor]]] = {
        "one": (in_turn, tasks),
        "other": (in_turn, tasks[::-1]),
        "together": (at_once, tasks),
        "wrong": (in_turn, [tasks[0], tasks[1] + 1]),
    }
    for name, (run, given) in runs.items():
        tool = Fingerprint(folder=tmp_path / name)
        tools = [tool, Meeting()] if run is at_once else [tool]
        with amanda.apply(*tools, threads="all"):
            run(given)
        rows = tool.result().open().rows
        # Each output is that of the input beside it.
        read, wrote = (
            {int(row["execution"]): int(row["digest"]) for row in rows if row["what"] == what}
            for what in (INPUT, OUTPUT)
        )
        expected = {
            xxhash.xxh3_64_intdigest(x.numpy().tobytes()): xxhash.xxh3_64_intdigest(
                x.clamp(min=0).numpy().tobytes()
            )
            for x in given
        }
        assert {read[number]: wrote[number] for number in read} == expected
    for name in ("other", "together"):
        found = compare_fingerprints(tmp_path / "one", tmp_path / name)
        assert (found.same, found.complete) == (True, True), found.conclusion()
    found = compare_fingerprints(tmp_path / "one", tmp_path / "wrong")
    # Which task would have been which is not known.
    assert (found.same, found.complete) == (True, False)


def test_more_executions_in_a_step_shift_nothing_in_the_next(tmp_path: Path) -> None:
    def program(times: int) -> None:
        for step in range(3):
            for number in range(times if step == 0 else 1):
                torch.relu(torch.tensor([float(number), float(step)]))
            amanda.step()

    for name, times in (("a", 1), ("b", 3)):
        recorded(partial(program, times), folder=tmp_path / name)
    found = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert (found.same, found.complete) == (True, False)
    assert {one.run for one in found.missing} == {"B"}
    assert all("step 0" in one.what for one in found.missing)


def test_what_was_not_compared_is_said_of_the_operator_that_differs(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)

    def program(scale: float) -> None:
        made = torch.exp(x)
        made.detach().numpy()[...] *= scale  # What `exp` has saved, and no operator writes.
        made.backward(torch.ones(3))  # type: ignore[no-untyped-call]

    for name, scale in (("a", 1.0), ("b", 2.0)):
        recorded(partial(program, scale), folder=tmp_path / name)
    first = compare_fingerprints(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.phase, first.cause) == ("backward", "operator")
    assert "Not compared is what its forward pass saved." in first.explanation


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for rank in range(2 if run == "a" else 1):
            recorded(training, folder=tmp_path / run / f"rank{rank}")
    found = compare_fingerprints(tmp_path / "a", tmp_path / "b")
    assert (found.same, found.complete) == (True, False)
    assert [(one.process, one.run, one.what) for one in found.missing] == [
        ("rank1", "A", "the whole process")
    ]


def test_another_dtype_is_a_difference(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.float32), ("b", torch.float64)):
        recorded(partial(torch.ones, 2, dtype=dtype), folder=tmp_path / name)
    first = compare_fingerprints(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert first.types == ("float32[2]", "float64[2]")


def test_files_that_are_cut_off_are_read_up_to_there(tmp_path: Path) -> None:
    whole = recorded(lambda: training(3, steps=30), folder=tmp_path / "whole").open()
    for name in ("ops.jsonl", ROWS):
        content = (tmp_path / "whole" / name).read_bytes()
        for number in range(20):
            cut = tmp_path / f"{name}{number}"
            cut.mkdir()
            for other in ("ops.jsonl", ROWS):
                (cut / other).write_bytes((tmp_path / "whole" / other).read_bytes())
            (cut / name).write_bytes(content[: len(content) * number // 20])
            try:
                found = load_fingerprint(cut)
            except ResultError:
                assert number == 0
                continue
            assert not found.ended
            assert len(found.rows) < len(whole.rows) or name == "ops.jsonl"
            assert (found.rows == whole.rows[: len(found.rows)]).all()


def test_a_damaged_block_ends_the_reading(tmp_path: Path) -> None:
    recorded(lambda: training(3, steps=60), folder=tmp_path / "a")
    content = bytearray((tmp_path / "a" / ROWS).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a" / ROWS).write_bytes(content)
    found = load_fingerprint(tmp_path / "a")
    assert "damaged" in found.damage
    assert not found.ended


def test_a_program_that_is_killed_leaves_its_rows(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, torch, amanda\n"
        "from pathlib import Path\n"
        "from amanda_tools.fingerprint import Fingerprint\n"
        f"with amanda.apply(Fingerprint(folder=Path({str(tmp_path / 'out')!r}))):\n"
        "    for step in range(3):\n"
        "        torch.ones(2) + step\n"
        "        amanda.step()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, str(script)], check=False)
    found = load_fingerprint(tmp_path / "out")
    assert not found.ended
    assert sorted(set(found.rows["step"].tolist())) == [0, 1, 2]


def test_a_run_that_is_killed_leaves_what_its_tools_recorded(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys, time, torch\n"
        "for step in range(3):\n"
        "    torch.relu(torch.full((2,), float(step)))\n"
        "saved = os.path.join(sys.argv[1], 'dump.json')\n"
        "for _ in range(600):\n"
        "    time.sleep(0.1 * (not os.path.exists(saved)))\n"
        "torch.sigmoid(torch.ones(2))\n"
        "if sys.argv[2] == 'kill':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for end in ("kill", "well"):
        out = str(tmp_path / end)
        command = [sys.executable, "-m", "amanda", "run", "-q", "-t", "fingerprint", "-t", "dump"]
        subprocess.run([*command, "-o", out, str(script), out, end], check=end == "well")
    killed, whole = (load_fingerprint(tmp_path / end) for end in ("kill", "well"))
    assert not killed.ended
    assert whole.ended
    words = [killed.ops[row["op"]].word for row in killed.rows if row["what"] == OUTPUT]
    assert words.count("relu") == 3
    dumped = load_dump(tmp_path / "kill")
    assert [
        dumped.read(one).array.tolist() for one in dumped.index.tensors if "relu" in str(one.key)
    ] == [*([0.0, 0.0], [1.0, 1.0], [2.0, 2.0])]
    # A run that ends well leaves its results only, also where it replaces those of a killed one.
    out = str(tmp_path / "kill")
    subprocess.run([*command, "-o", out, "--force", str(script), out, "well"], check=True)
    for end in ("kill", "well"):
        assert {one.name for one in (tmp_path / end).iterdir()} == {
            *("fingerprint", "fingerprint.json", "dump", "dump.json")
        }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_writes_nothing(tmp_path: Path) -> None:
    tool = Fingerprint(folder=tmp_path / "a")
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
        child = os.fork()
        if not child:
            for _ in range(3):
                torch.sigmoid(torch.ones(2))
                amanda.step()
            os._exit(0)
        os.waitpid(child, 0)
        torch.relu(torch.ones(2))
    tool.result()
    found = load_fingerprint(tmp_path / "a")
    assert found.ended
    assert [op.word for op in found.ops if op.zone == "model"].count("relu") == 2


def test_inputs_have_their_producers() -> None:
    found = recorded(lambda: torch.relu(torch.ones(2) * 2)).open()
    rows = found.rows
    (read,) = [row for row in rows if found.ops[row["op"]].word == "relu" and row["what"] == INPUT]
    (made,) = rows[rows["order"] == read["producer"]]
    assert found.ops[made["op"]].word == "mul"


def test_norms(tmp_path: Path) -> None:
    rows = recorded(lambda: torch.clone(torch.tensor([3.0, -4.0])), norms=True).open().rows
    assert (float(rows["norm"][-1]), float(rows["largest"][-1])) == (5.0, 4.0)


def test_it_sees_what_other_tools_change(tmp_path: Path) -> None:
    def doubled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    for number, edits in enumerate(([], [amanda.edit("relu", doubled, outputs=[0])])):
        tool = Fingerprint(folder=tmp_path / str(number))
        with amanda.apply(*edits, tool):
            torch.relu(torch.ones(2))
        tool.result()
    first = compare_fingerprints(tmp_path / "0", tmp_path / "1").first
    assert first is not None
    assert (first.op, first.cause) == ("relu", "operator")


def test_fingerprints_and_dumps_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(training, folder=tmp_path / "a")
    with amanda.apply(dump := Dump()):
        training()
    dump.result().write(tmp_path / "b")
    assert exit_status("diff", tmp_path / "a", tmp_path / "b") == 2
    assert "One run has a fingerprint, the other has none" in capsys.readouterr().err
    assert exit_status("diff", tmp_path / "a", tmp_path / "a", "--rtol", 1) == 3


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(lambda: torch.relu(torch.ones(2)), folder=tmp_path / "a")
    recorded(lambda: torch.relu(-torch.ones(2)), folder=tmp_path / "b")
    assert exit_status("diff", tmp_path / "a", tmp_path / "b", "--json") == 1
    read = json.loads(capsys.readouterr().out)
    assert (read["format"], read["same"], read["complete"]) == (
        "amanda.fingerprint_diff/1",
        False,
        False,
    )


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_compiled_operators_have_the_digests_of_the_same_values_in_eager_mode(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.GELU(), torch.nn.Linear(6, 2)
    model, x = torch.nn.Sequential(*layers), torch.linspace(-1, 1, 8).reshape(2, 4)
    digests = []
    # This backend runs the traced operators one by one, so that they compute the same bits.
    for name, function in (
        ("eager", model),
        ("compiled", torch.compile(model, backend="aot_eager")),
    ):
        model.zero_grad()
        tool = Fingerprint()
        with amanda.apply(tool):
            function(x).square().sum().backward()
        tool.result().write(tmp_path / name)
        digests.append(set(load_fingerprint(tmp_path / name).rows["digest"].tolist()))
    assert len(digests[0]) > 20
    assert digests[0] == digests[1]
