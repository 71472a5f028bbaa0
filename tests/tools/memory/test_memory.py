"""Memory profiler on PyTorch: chains computed by hand, views, backward, checkpoints, forms."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.results import HasResult, Result
from amanda_tools.memory import AllocatingOp, Memory, MemoryResult

from ..profiling import checked_trace

#: Bytes of the tensors below.
N = 4 * 1000


def follow(program: Callable[[], Any], **options: Any) -> MemoryResult:
    """Return what a program allocates; its results are alive at the end."""
    tool = Memory(**options)
    with amanda.apply(tool):
        kept = program()
    found = tool.result()
    del kept
    return found


def live(result: MemoryResult) -> list[int]:
    """Return the live memory at each change."""
    found = [moment.live for moment in result.timeline]
    return [one for index, one in enumerate(found) if index == 0 or one != found[index - 1]]


def test_a_chain_by_hand() -> None:
    x = torch.ones(1000)

    def chain() -> torch.Tensor:
        y = x * 2
        z = y + 1
        del y
        w = z.view(10, 100).exp_()  # A view, written in place: nothing new.
        return w.sum()

    found = follow(chain)
    assert live(found) == [0, N, 2 * N, N, N + 4, 4]
    assert (found.peak, found.peak_op) == (2 * N, "add")
    assert (found.allocated, found.live, found.given) == (2 * N + 4, 4, N)
    rows = {op.type: op for op in found.ops}
    assert [rows[name].allocated for name in ("mul", "add", "view", "exp_", "sum")] == [
        N,
        N,
        0,
        0,
        4,
    ]
    assert [rows[name].live_after for name in ("mul", "add", "view", "exp_", "sum")] == [
        N,
        2 * N,
        N,
        N,
        N + 4,
    ]
    assert (rows["mul"].at_peak, rows["add"].at_peak, rows["sum"].at_peak) == (N, N, 0)
    assert (rows["sum"].live, rows["add"].live) == (4, 0)


def test_what_backward_needs_is_alive_until_it_has_used_it() -> None:
    x = torch.ones(1000, requires_grad=True)

    def program() -> None:
        # exp keeps its result, sin its input, neg nothing.
        loss: Any = x.exp().neg().sin().sum()
        middle.append(tool.result().live)
        loss.backward()

    middle: list[int] = []
    tool = Memory()
    with amanda.apply(tool):
        program()
    found = tool.result()
    # The results of exp (for itself) and of neg (for sin); the sum.
    assert middle == [2 * N + 4]
    rows = {(op.type, op.phase): op for op in found.ops}
    assert rows["sin", "forward"].live_after == 3 * N
    assert rows["SinBackward0", "backward"].allocated == N
    # In the end there is the gradient of the leaf.
    assert found.live == N
    # The results of exp and neg, the gradient of sin and the cosine that it is computed with; the
    # loss and its gradient.
    assert found.peak == 4 * N + 4 + 4
    assert rows["SinBackward0", "backward"].largest_workspace == N


def layers() -> nn.Sequential:
    """Return four layers, each of which saves its result."""
    return nn.Sequential(*(nn.Sigmoid() for _ in range(4)))


def test_a_checkpoint_keeps_nothing_but_runs_again() -> None:
    model = layers()

    def alive(program: Callable[[torch.Tensor], Any]) -> tuple[int, MemoryResult]:
        x = torch.ones(1000, requires_grad=True)
        tool = Memory()
        with amanda.apply(tool):
            y = program(x)
            before = tool.result().live
            y.sum().backward()
        return before, tool.result()

    before, plain = alive(model)
    assert before == 4 * N
    for reentrant in (True, False):
        before, found = alive(partial(checkpoint, model, use_reentrant=reentrant))
        assert before == N  # The result, and nothing inside.
        # The last one's result is not needed again, which one of the two kinds notices.
        assert found.by_type()["sigmoid"].calls == 11 + reentrant
        assert plain.by_type()["sigmoid"].calls == 8
        assert found.allocated > plain.allocated
        assert found.live == plain.live == 2 * N  # The result, and the gradient.


def test_what_is_kept_and_not_given() -> None:
    """Operators keep values for backward that they do not give."""
    logits = torch.ones(10, 100, requires_grad=True)
    target = torch.zeros(10, dtype=torch.long)
    found = follow(lambda: F.cross_entropy(logits, target))
    # The loss, the logarithms of all probabilities, and the sum of the weights.
    assert found.live == 4 + N + 4

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x + 1)
            return x.sum()

    x = torch.ones(1000, requires_grad=True)
    assert follow(lambda: Own.apply(x)).live == N + 4  # type: ignore[no-untyped-call]
    assert follow(lambda: F.dropout(x, 0.5, True)).live == 2 * N  # The mask, in numbers.
    with torch.no_grad():
        assert follow(lambda: F.cross_entropy(logits, target)).live == 4


def test_views_count_once() -> None:
    def program() -> Any:
        x = torch.ones(1000)
        return [x.view(10, 100).t(), x[::2], x.expand(5, 1000), x.detach(), torch.split(x, 100)]

    found = follow(program)
    assert (found.allocated, found.live) == (N, N)
    copied = follow(lambda: torch.ones(10, 100).t().contiguous())
    assert copied.allocated == 2 * N


def test_a_storage_that_grows() -> None:
    x = torch.ones(1000)
    found = follow(lambda: torch.empty(10).resize_(1000).copy_(x))
    assert live(found) == [40, 0, N]
    assert (found.allocated, found.peak) == (40 + N, N)


def test_steps_and_an_optimizer() -> None:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    tool = Memory()
    with amanda.apply(tool):
        for _ in range(3):
            model(torch.ones(5, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = tool.result()
    steps = [step for step in found.steps if step.allocated]
    assert [step.number for step in steps] == [0, 1, 2]
    # The momentum stays: it is the first step's gradient, cloned. The gradient is there, too,
    # when the optimizer's step ends.
    assert {step.live for step in steps[:2]} == {2 * 400}
    assert found.live == 400
    optimizers = sum(op.live for op in found.ops if op.zone == "optimizer")
    assert optimizers == 400
    assert found.given == 400  # The weight; all else is made in between.
    model_only = Memory(everything=False)
    with amanda.apply(model_only):
        model(torch.ones(5, 10)).sum().backward()
        optimizer.step()
    assert {op.zone for op in model_only.result().ops} == {"model"}


def test_building_is_no_step_and_the_peak_is_divided() -> None:
    tool = Memory()
    with amanda.apply(tool):
        model = nn.Sequential(nn.Linear(100, 100, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            model(torch.ones(50, 100)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = tool.result()
    weight, batch = 4 * 100 * 100, 4 * 50 * 100
    assert found.building == weight
    assert found.table("step").rows[0][:2] == ("(model building)", weight)
    # Two activations, two of their gradients, that of the weight, and the momentum.
    assert found.steps[0].allocated < 6 * batch + 2 * weight
    kinds = found.kinds_at_peak
    # While the square is differentiated, with the power and the product that its gradient needs.
    assert (kinds["weights"], kinds["gradients"]) == (weight, batch + 4)
    assert (kinds["optimizer state"], kinds["workspaces"]) == (weight, 2 * batch)
    assert sum(kinds.values()) == found.peak + found.given
    rows: dict[Any, Any] = {row[0]: row for row in found.table().rows}
    assert rows["(no module)"][2] + rows["0"][2] == rows["(all)"][2]
    assert f"at the peak {weight / 1000:.3f} kB weights" in found.table().title


def test_weights_that_existed_before_are_told_from_data() -> None:
    model, x = nn.Conv2d(3, 8, 3), torch.ones(4, 3, 16, 16)
    found = follow(lambda: model(x))
    kinds = found.kinds_at_peak
    assert kinds["weights"] == 4 * (3 * 8 * 9 + 8)
    assert kinds["other"] == 4 * x.numel()
    assert kinds["activations"] == 4 * 4 * 8 * 14 * 14


def test_what_is_selected_is_followed() -> None:
    x = torch.ones(1000)
    tool = Memory().where(amanda.select(op="add"))
    with amanda.apply(tool):
        y = (x * 2) + 1
    found = tool.result()
    assert (found.live, found.given) == (N, N)  # The product was there before.
    del y


def test_nothing_is_kept_alive() -> None:
    tool = Memory()
    with amanda.apply(tool):
        x = torch.ones(1000)
        watched = weakref.ref(x)
        storage = weakref.ref(x.untyped_storage())
        y = x.exp()
        del x
        assert watched() is None
        assert storage() is None
        assert tool.result().live == N
        del y
    assert tool.result().live == 0


def test_a_view_that_autograd_forbids() -> None:
    # Reading `grad_fn` of a view that was made and written without gradients raises.
    found = follow(lambda: nn.Embedding(10, 5, padding_idx=0))
    assert found.allocated == 4 * 50


def test_what_has_no_storage_is_named() -> None:
    found = follow(lambda: torch.eye(10).to_sparse())
    assert any("sparse" in note for note in found.notes)


def test_the_peak_is_that_of_pytorch_s_own_profiler() -> None:
    """It records each allocation on the CPU; none of these operators has a workspace."""
    model = nn.Sequential(nn.Linear(50, 50), nn.Sigmoid(), nn.LayerNorm(50), nn.Linear(50, 10))
    x = torch.rand(20, 50)

    def train() -> None:
        loss: Any = F.cross_entropy(model(x), torch.zeros(20, dtype=torch.long))
        loss.backward()
        model.zero_grad()

    alive = allocated(train)
    found = follow(train)
    assert (found.peak, found.live) == (max(alive), alive[-1])


def allocated(program: Callable[[], object]) -> list[int]:
    """Return the live bytes after each allocation that PyTorch's own profiler records."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        program()
    recorded: Any = profile.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    return list(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).view(8, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GELU": lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
    "LSTM": lambda: nn.LSTM(64, 64, 2),
    "GRU": lambda: nn.Sequential(nn.Unflatten(0, (16, 8)), nn.GRU(64, 64, 2)),
    "attention": Attention,
    "encoder": lambda: nn.Sequential(
        nn.Unflatten(0, (16, 8)), nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)
    ),
}
X = torch.linspace(-1, 1, 128 * 64).view(128, 64)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_has_the_workspaces_of_kernels(name: str, train: bool) -> None:
    model = MODELS[name]().train(train)

    def run() -> None:
        with torch.set_grad_enabled(train):
            found = model(X)
        loss = (found[0] if isinstance(found, tuple) else found).sum()
        # PyTorch sums the gradients of a weight that is read in each step of a GRU between the
        # operators, where nothing is measured; with these results that would be the peak.
        del found
        if train:
            loss.backward()
            model.zero_grad()

    run()
    expected = max(allocated(run))

    def three() -> None:  # The workspaces of the third are known from the others.
        for _ in range(3):
            run()

    for program in (run, three):
        found = follow(program)
        assert found.peak == pytest.approx(expected, rel=0.002)
        assert sum(op.at_peak for op in found.ops) == found.peak
        assert "without what kernels" not in found.table().title
    if name == "LSTM":
        peak = next(op for op in found.ops if op.name == found.peak_op)
        assert peak.largest_workspace == found.kinds_at_peak["workspaces"]
        assert "workspace B" in found.table("op").columns


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["BERT", "ResNet"])
def test_the_peak_of_models_of_a_library(name: str, train: bool) -> None:
    transformers = pytest.importorskip("transformers")
    if name == "BERT":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        config = transformers.BertConfig(hidden_size=64, vocab_size=99, **sizes)
        model, x = transformers.BertModel(config), torch.arange(4 * 16).view(4, 16)
    else:
        config = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], layer_type="basic"
        )
        model, x = transformers.ResNetModel(config), torch.ones(2, 3, 64, 64)
    model.train(train)

    def run() -> None:
        with torch.set_grad_enabled(train):
            found = model(x)[0]
        if train:
            found.sum().backward()
            model.zero_grad()

    run()
    assert follow(run).peak == pytest.approx(max(allocated(run)), rel=0.01)


def test_workspaces_that_are_not_measured_are_named() -> None:
    model = MODELS["LSTM"]()
    with torch.profiler.profile(profile_memory=True):
        found = follow(lambda: model(X))
    assert "without what kernels allocate and free inside an operator" in found.table().title


def test_operators_that_raise_leave_no_profiler() -> None:
    def fail() -> None:
        with contextlib.suppress(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)

    def program() -> None:
        for _ in range(3):
            fail()
        Outer.apply(torch.ones(3, 3, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
        fail()

    found = follow(program)
    assert not torch._C._autograd._profiler_enabled()
    assert not sum(op.not_measured for op in found.ops)


class Outer(torch.autograd.Function):
    """Runs a forward and a backward pass inside of an operator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            F.gelu(x @ x).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_peak_of_cuda() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Sigmoid(), nn.Linear(100, 7)).cuda()
    x = torch.rand(33, 100, device="cuda")
    model(x).sum().backward()  # Libraries allocate their workspaces.
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tool = Memory()
    with amanda.apply(tool):
        model(x).sum().backward()
    found = tool.result()
    assert found.peak == torch.cuda.max_memory_allocated() - before


# The accounts.


# Forms.


def test_the_result_has_all_forms(tmp_path: Path) -> None:
    tool = Memory()
    assert isinstance(tool, HasResult)
    assert tool.result().table().rows == [("(all)", 0, 0, 0, 0)]
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.ReLU()))
    with amanda.apply(tool):
        model(torch.ones(5, 10)).sum().backward()
    found = tool.result()
    assert isinstance(found, Result)
    read = json.loads(found.to_json())
    assert read["format"] == "amanda.memory/1"
    assert [AllocatingOp(**op) for op in read["ops"]] == found.ops
    assert read["peak"] == found.peak == sum(op.at_peak for op in found.ops)
    assert read["by_module"]["1"] == read["by_module"]["1.0"]
    assert read["by_module"][""]["allocated"] == found.allocated
    assert [row[0] for row in found.table(depth=1).rows] == [*("(all)", "0", "1", "(no module)")]
    assert len(found.table("op").rows) == len(found.ops)
    assert len(found.table("step").rows) == 1
    assert "relu" in {row[0] for row in found.table("type").rows}
    assert "peak " in found.table().title
    assert "<td>relu</td>" in found._repr_html_()
    (path,) = found.write(tmp_path)
    counters = [event for event in checked_trace(path) if event["ph"] == "C"]
    assert max(event["args"]["from operators"] for event in counters) == found.peak
    wrong: Any = "place"
    with pytest.raises(ValueError, match="by must be"):
        found.table(wrong)
    with pytest.raises(ValueError, match="limit must not be negative"):
        Memory(limit=-1)


def test_a_limit_of_the_timeline() -> None:
    found = follow(lambda: [torch.ones(10) for _ in range(5)], limit=2)
    assert (len(found.timeline), found.left_out, found.allocated) == (2, 3, 200)


@pytest.mark.slow
def test_as_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = follow(lambda: torch.ones(10)).to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["allocated"]) == [40]


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
    x = torch.rand(3, 4, requires_grad=True)
    plain = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    with amanda.apply(Memory()):
        seen = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


def test_parameters_and_states_of_optimizers_have_their_names() -> None:
    """The names are those of `named_parameters` and of the optimizer's own state."""
    tool = Memory()
    with amanda.apply(tool):
        model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2, bias=False)))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(5, 3)).sum().backward()
            optimizer.step()
    found = {op.holds: op for op in tool.result().ops if op.holds}
    expected = {}
    for name, parameter in model.named_parameters():
        expected[name] = parameter.nbytes
        for state, value in optimizer.state[parameter].items():
            if state != "step":  # One operator makes that of all parameters.
                expected[f"{state} of {name}"] = value.nbytes
    assert {name: op.live for name, op in found.items() if "more" not in name} == expected
    assert {op.type for name, op in found.items() if " of " not in name} == {"empty"}
    assert found["step of 0.weight and 2 more"].live == 3 * 4
    rows = [row[0] for row in tool.result().table("op").rows]
    assert "exp_avg_sq of 1.0.weight" in rows
    assert not any(str(row).startswith("empty") for row in rows)


def test_a_buffer_that_was_there_before_has_no_name_in_the_table() -> None:
    linear, tool = nn.Linear(3, 2), Memory()
    with amanda.apply(tool):
        linear(torch.ones(1, 3))
    assert [op.holds for op in tool.result().ops] == ["", ""]


def test_a_compiled_step_of_an_optimizer_stays_as_it_is() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        run: Callable[..., Any] = graph.forward
        return run

    torch._dynamo.reset()
    other = nn.Linear(100, 10)
    others = torch.optim.AdamW(other.parameters())
    with amanda.apply(Memory()):
        other(torch.ones(1, 100)).sum().backward()
        others.step()  # Its states, which live on, belong to another program.
    net = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    step = torch.compile(optimizer.step, backend=backend)
    tool, x = Memory(), torch.ones(1, 100)
    with amanda.apply(tool):
        for _ in range(3):
            optimizer.zero_grad()
            net(x).sum().backward()
            step()
    # No routine is woven in: its operators are torch's own.
    assert graphs
    assert all("amanda" not in str(node.target) for graph in graphs for node in graph.graph.nodes)
    found = tool.result()
    assert found.peak == N + 8  # The gradient, the sum and its own.
    # The weight and its batch, and of each step two states of the same size and a number.
    assert found.given == N + 400 + 2 * N + 4
    assert found.kinds_at_peak["optimizer state"] == 2 * N + 4
    assert "not counted: buffers inside compiled steps of optimizers" in found.notes
    torch._dynamo.reset()
