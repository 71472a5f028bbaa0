"""The recorder of the PyTorch driver records what the tool does in Python, without calling it."""

from __future__ import annotations

import random
import struct
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from python_calls import python_calls
from torch import nn

import amanda
from amanda_driver_torch.facts import FACTS
from amanda_tools.diff import compare_fingerprints
from amanda_tools.fingerprint import Fingerprint
from amanda_tools.fingerprint.files import (
    INPUT,
    NOBODY,
    REUSED,
    UNWRITTEN,
    Fingerprinted,
    row_dtype,
)
from amanda_tools.fingerprint.tool import Level

pytestmark = pytest.mark.one_interceptor

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class InPython(Fingerprint):
    """Records as it does with drivers that have no recorder."""

    has_plain_rows = False


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Counter[Fingerprint]:
    """Count the operators that a tool itself records, which a driver's recorder spares it."""
    found: Counter[Fingerprint] = Counter()
    enter = Fingerprint.enter

    def counted(tool: Fingerprint, *inputs: Any, op: Any) -> None:
        found[tool] += 1
        enter(tool, *inputs, op=op)

    monkeypatch.setattr(Fingerprint, "enter", counted)
    return found


class Keeper:
    """Answers that no test may need; those that it does are set by the test."""

    def __getattr__(self, name: str) -> Any:
        def answer(*values: object) -> Any:
            raise RuntimeError(f"{name} was asked")

        return answer

    def thread(self) -> int:
        return 3

    def number_of_type(self, tensor: torch.Tensor) -> int:
        return tensor.dim()


@pytest.fixture(scope="module", autouse=True)
def _found() -> None:
    with amanda.apply(amanda.Tool()):  # The extension looks for torch's symbols.
        torch.ones(1) + 1
    if FACTS.recorder(Keeper(), bytearray()) is None:
        pytest.skip("the extension has no recorder here")


class Rows:
    """The rows of values that a recorder was called with."""

    def __init__(self, keeper: Keeper | None = None, **options: Any) -> None:
        self.pending = bytearray()
        self.recorder = FACTS.recorder(keeper or Keeper(), self.pending)
        self.recorder.takes = True
        for name, value in options.items():
            setattr(self.recorder, name, value)
        self.before, self.after = self.recorder.notes(7, 0, False, False, False)

    def of(self, *values: object) -> Any:
        import numpy

        self.before()
        del self.pending[:]
        self.after(*values)
        return numpy.frombuffer(bytes(self.pending), row_dtype())


def digest_of(value: torch.Tensor) -> int:
    plain = value.detach().clone(memory_format=torch.contiguous_format)
    return xxhash.xxh3_64_intdigest(bytes(plain.flatten().view(torch.uint8).tolist()))


def test_digests_of_all_lengths_are_those_of_xxh3() -> None:
    content, rows = torch.randint(0, 256, (70_000,), dtype=torch.uint8), Rows()
    plain = bytes(content.tolist())
    for length in (*range(1300), 4096, 8191, 8192, 8193, 65_537, 70_000):
        for start in (0, 1) if length < 70_000 else (0,):
            found = rows.of(content[start : start + length])["digest"].tolist()
            assert found == [xxhash.xxh3_64_intdigest(plain[start : start + length])], length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_of_views_are_those_of_the_elements_in_order(dtype: torch.dtype) -> None:
    drawn, rows = random.Random(str(dtype)), Rows()
    for _ in range(60):
        shape = [drawn.choice((1, 2, 3, 4, 17, 20)) for _ in range(drawn.randint(0, 4))]
        value = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        value = value.view(dtype).reshape(shape)
        value = value.permute(drawn.sample(range(len(shape)), len(shape)))
        for axis in range(len(shape)):
            if drawn.random() < 0.2:
                value = value.narrow(axis, 0, 1).expand(
                    *value.shape[:axis], 3, *value.shape[axis + 1 :]
                )
            elif drawn.random() < 0.5:
                value = value[(slice(None),) * axis + (slice(drawn.randint(0, 2), None, 2),)]
        found = rows.of(value, value.mT if value.dim() > 1 else value)["digest"].tolist()
        assert found[0] == digest_of(value)
        assert found[1] == digest_of(value.mT if value.dim() > 1 else value)


def test_large_transposed_matrices_are_read_in_order() -> None:
    rows = Rows()
    for shape in ((512, 300), (33, 47), (16, 3), (3, 16, 19)):
        value = torch.randn(shape).transpose(-1, -2)
        assert rows.of(value)["digest"].tolist() == [digest_of(value)]


def test_a_row_has_what_the_operator_and_the_value_are() -> None:
    rows = Rows(order=10, step=4)
    (found,) = rows.of([torch.ones(2, 3)])
    assert found["order"] == 12  # The call before the operator has one as well.
    assert [found[name] for name in ("op", "step", "execution", "what")] == [7, 4, 0, 2]
    assert [found[name] for name in ("type", "position", "item", "thread")] == [2, 0, 0, 3]
    assert struct.calcsize("<IIIIIIHHBBHQff") == found.nbytes == 48


def test_further_positions_and_items_share_the_last_number() -> None:
    class Quiet(Keeper):
        def flush(self) -> None:
            """Leave the rows where the test reads them."""

    values = [torch.ones(1)] * 65_540
    found = Rows(Quiet()).of(*values)["position"].tolist()
    assert found == [min(n, 65_535) for n in range(65_540)]
    found = Rows(Quiet()).of(values)["item"].tolist()
    assert found == [min(n, 65_534) for n in range(65_540)]


def test_norms_are_those_of_torch() -> None:
    rows = Rows(with_norms=True)
    every_half = torch.arange(65_536).to(torch.uint16).view(torch.float16)
    finite = every_half[every_half.isfinite()]
    shapes = [(1,), (15,), (16,), (2113,), (33, 7), (5, 1000)]
    drawn = [torch.randn(shape, dtype=dtype) for shape in shapes for dtype in FLOATS]
    same = [torch.full((5,), -2.0, dtype=dtype) for dtype in FLOATS]
    for value in (*drawn, drawn[-1].mT, *same, *finite[:, None], finite.flip(0), finite.bfloat16()):
        (found,) = rows.of(value)
        norm = torch.linalg.vector_norm(value.double()).item()
        assert found["norm"] == pytest.approx(norm, rel=1e-6)
        assert found["largest"] == value.abs().max().float().item()
        assert bool(found["flags"] & 32) == bool((value == value.flatten()[0]).all())
    asked = []

    class Asked(Keeper):
        def norms(self, tensor: torch.Tensor) -> tuple[float, float, bool]:
            asked.append(tensor)
            return 1.0, 2.0, False

    rows = Rows(Asked(), with_norms=True)
    hard = (torch.tensor([1.0, float("nan")]), torch.full((3,), 1e30), torch.full((3,), 1e-30))
    for value in (*hard, torch.ones(2, dtype=torch.complex64)):
        assert rows.of(value)["largest"].tolist() == [2.0]
    assert len(asked) == 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm, self.words = nn.BatchNorm1d(6), nn.Embedding(5, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(self.words(tokens))).relu_()
        left, right = x.chunk(2, 0)
        scratch = torch.empty(2, 6)
        scratch.copy_(left + right.flip(0))
        scores: torch.Tensor = self.last(scratch.t().contiguous().t()).log_softmax(-1)
        return scores


def train(tool: Fingerprint, folder: Path) -> Fingerprinted:
    torch.manual_seed(0)
    random.seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    def step() -> None:
        loss = net(torch.randint(0, 5, (4,)))[:, 0].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # The second time, what is known of the weights is kept.
        with amanda.apply(tool):
            for _ in range(3):
                step()
            torch.sparse.mm(torch.eye(2).to_sparse(), torch.ones(2, 2))
            with torch.inference_mode():
                torch.ones(3).to(torch.float8_e5m2)
            net.last.weight.data.mul_(2)  # Nobody counts this.
            net.last(torch.ones(2, 6))
    tool.result().write(folder)
    return tool.result().open()


@pytest.mark.parametrize(
    "options",
    [{}, {"check": 3}, {"norms": True}, {"steps": [1, 2]}, {"everything": False}],
    ids=str,
)
def test_rows_are_those_that_python_makes(
    tmp_path: Path, options: dict[str, Any], entered: Counter[Fingerprint]
) -> None:
    own, python = Fingerprint(**options), InPython(**options)
    one, other = train(own, tmp_path / "one"), train(python, tmp_path / "other")
    assert [entered[own], entered[python] > 0] == [0, True]
    assert (one.types, one.ops, one.inputs) == (other.types, other.ops, other.inputs)
    assert len(one.rows) == len(other.rows) > 100
    # Whatever is in memory that nothing has written.
    written = one.rows["flags"] & UNWRITTEN == 0
    assert 0 < (~written).sum() < 100
    for name in row_dtype().names or ():
        if name == "digest":
            assert one.rows[name][written].tolist() == other.rows[name][written].tolist()
        elif name in ("norm", "largest"):
            assert one.rows[name].tolist() == pytest.approx(other.rows[name].tolist(), rel=1e-6)
        else:
            assert one.rows[name].tolist() == other.rows[name].tolist(), name
    assert compare_fingerprints(tmp_path / "one", tmp_path / "other").same


def test_routines_of_other_tools_read_the_context_beside_it() -> None:
    class Reader(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.read: list[list[float]] = []
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.op_type == "MulBackward0":
                context.insert_before_backward_op(
                    lambda *_: self.read.append(context.get_inputs()[0].tolist()), observe=True
                )

    def step(number: int) -> None:
        x = torch.full((2,), float(number), requires_grad=True)
        torch.autograd.backward((x * 2).sum())

    fingerprint, reader = Fingerprint(), Reader()
    for tools in ((fingerprint,), (fingerprint, reader), (fingerprint,), (reader, fingerprint)):
        with amanda.apply(*tools):
            for number in range(4):
                step(number)
    assert reader.read == 2 * [[number, number] for number in range(4)]


@pytest.mark.parametrize("kind", [Fingerprint, InPython])
def test_large_inputs_are_read_again_where_a_part_of_a_step_begins(
    kind: type[Fingerprint], tmp_path: Path
) -> None:
    """Not after the operator that wrote them, nor by the next ones, but for one of 16."""
    weight = torch.ones(4, 4096, requires_grad=True)
    optimizer, small = torch.optim.SGD([weight], 1e-3), torch.ones(4) * 1
    tool = kind()
    with amanda.apply(tool):
        for _ in range(2):
            scaled = weight * 2
            for _ in range(16):
                scaled.relu()
                small.relu()
            torch.autograd.backward(scaled.sum())
            optimizer.step()
    tool.result().write(tmp_path / "run")
    found = tool.result().open()
    rows = found.rows[found.rows["what"] == INPUT]
    is_large = numpy.asarray(["4096" in sizes for sizes in found.types])[rows["type"]]
    reused = rows["flags"] & REUSED != 0
    assert not reused[~is_large].any()
    names = [found.ops[number].name for number in rows["op"]]
    relu = numpy.asarray([name == "relu" for name in names]) & is_large
    assert (relu.sum(), reused[relu].sum()) == (32, 30)
    # The optimizer reads the gradient again, into which a collective may have written.
    zones = numpy.asarray([found.ops[number].zone for number in rows["op"]])
    step = (zones == "optimizer") & is_large
    assert step.any()
    assert not reused[step].any()
    # Of a weight, it is the first use in a step.
    assert not reused[numpy.asarray([name == "mul" for name in names])].any()


@pytest.mark.parametrize("level", ["modules", "steps"])
def test_visits_are_those_that_python_makes(
    tmp_path: Path, level: Level, entered: Counter[Fingerprint]
) -> None:
    class Coarse(InPython):
        def __init__(self) -> None:
            super().__init__(level=level)

    own, python = Fingerprint(level=level), Coarse()
    one, other = train(own, tmp_path / "one"), train(python, tmp_path / "other")
    assert [entered[own], entered[python] > 0] == [0, True]
    assert (one.types, one.ops) == (other.types, other.ops)
    assert len(one.rows) > 10
    for name in row_dtype().names or ():
        if name != "order":
            assert one.rows[name].tolist() == other.rows[name].tolist(), name
    assert compare_fingerprints(tmp_path / "one", tmp_path / "other").same


def test_a_step_calls_no_python_for_its_operators() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    counts = []
    for make in (None, Fingerprint, InPython):
        tools = () if make is None else (make(),)
        with amanda.apply(*tools):
            for _ in range(5):
                step()
            counts.append(python_calls(step))
    # Some for the whole step: it may be the one in which rows are written.
    assert counts[1] - counts[0] < 12 < 300 < counts[2] - counts[0]


def test_nothing_refers_to_tensors_after_apply(entered: Counter[Fingerprint]) -> None:
    weight, tool = torch.ones(3), Fingerprint()
    for _ in range(2):
        with amanda.apply(tool):
            weight * 2
            torch.utils.swap_tensors(weight, torch.ones(3))  # type: ignore[no-untyped-call]
            weight * 2
        assert weakref.getweakrefs(weight) == []
    assert tool.result().open().rows.size > 0 == entered[tool]


def test_tensors_that_died_are_forgotten() -> None:
    rows = Rows()
    for _ in range(5000):
        rows.of(torch.ones(2))
    assert rows.recorder.take() == []
    kept = torch.ones(2)
    rows.of(kept)
    ((found, known),) = rows.recorder.take()
    assert found is kept
    assert known[3] == digest_of(kept)
    # Another tensor at the same address was made by nobody.
    for _ in range(50):
        rows.of(torch.zeros(2))
        del rows.pending[:]
        rows.before(torch.ones(2))
        assert struct.unpack_from("<IIIII", rows.pending)[4] == NOBODY


def test_threads_read_large_tensors_at_the_same_time() -> None:
    tool, count = Fingerprint(), 6

    def work(number: int) -> None:
        for _ in range(20):
            torch.full((200_000,), float(number)) + torch.ones(200_000)

    with amanda.apply(tool, threads="all"):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = tool.result().open().rows
    assert (rows["order"][1:] >= rows["order"][:-1]).all()
    expected = {digest_of(torch.full((200_000,), float(n) + 1)) for n in range(count)}
    ops = [op.word for op in tool.result().open().ops]
    sums = rows[(rows["what"] == 2) & [ops[op] == "add" for op in rows["op"]]]
    assert set(sums["digest"].tolist()) == expected
    assert len(sums) == 20 * count


def test_rows_are_written_by_one_thread_at_a_time() -> None:
    tool = Fingerprint()
    with amanda.apply(tool):
        torch.ones(2) + 1
    assert tool._keeper is not None
    writing = threading.Thread(target=tool._keeper.flush)
    with tool._lock:
        writing.start()
        writing.join(0.05)
        assert tool._stream.pending
    writing.join()
    assert not tool._stream.pending


def test_an_error_of_the_tool_is_raised_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("the clock has stopped")

    monkeypatch.setattr(random, "getstate", fail)
    with amanda.apply(Fingerprint()), pytest.raises(OSError, match="stopped") as raised:
        torch.ones(2) + 1
    assert any("Fingerprint" in note for note in raised.value.__notes__)
