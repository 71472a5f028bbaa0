"""`Rematerialize` trains within a budget, with the gradients of plain PyTorch, bit for bit.

The bytes in use are taken from PyTorch's profiler. The overhead of the heuristics on a chain is
that of the authors' simulator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from example_scripts import load_benchmark
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.interface.facts import Facts
from amanda_tools.prune import Prune
from amanda_tools.rematerialize import Rematerialize, RematerializeResult
from amanda_tools.rematerialize.executions import Value
from amanda_tools.rematerialize.policy import Entry, Heuristic, choose
from amanda_tools.rematerialize.store import BudgetError, Store

pytestmark = pytest.mark.filterwarnings("ignore")  # the profiler's


class Chain:
    """A chain of n unit operators and their backward within a memory of some values.

    As in the authors' simulator: what backward no longer needs is not released.
    """

    def __init__(self, memory: int, heuristic: Heuristic) -> None:
        self.memory, self.heuristic = memory, heuristic
        self.clock, self.used = 0.0, 0
        self.free: list[Entry] = []
        self.locks: dict[Entry, int] = {}

    def run(self, length: int) -> float:
        """Return the computed operators divided by those of an unlimited memory."""
        forward: list[Entry] = []
        for _ in range(length):
            forward.append(self.compute(forward[-1:]))
        gradient = self.compute([])
        for number in range(length - 2, -1, -1):
            gradient = self.compute([*forward[max(number - 1, 0) : number], gradient])
        return self.clock / (2 * length)

    def compute(self, parents: Sequence[Entry]) -> Entry:
        entry = Entry(1, 1, parents)
        entry.resident, entry.last_access = False, -math.inf
        self.materialize(entry)
        entry.last_access = self.clock
        return entry

    def materialize(self, entry: Entry) -> None:
        for parent in entry.parents:
            parent.last_access = self.clock
        for parent in sorted(entry.parents, key=lambda parent: not parent.resident):
            if not parent.resident:
                self.materialize(parent)
            if not self.locks.get(parent):
                self.free.remove(parent)
            self.locks[parent] = self.locks.get(parent, 0) + 1
        while self.used + 1 > self.memory:
            evicted = choose(self.free, self.heuristic, self.clock)
            self.free.remove(evicted)
            evicted.evict()
            self.used -= 1
        self.clock += 1
        self.used += 1
        entry.restore()
        self.free.append(entry)
        for parent in entry.parents:
            self.locks[parent] -= 1
            if not self.locks[parent]:
                self.free.append(parent)


@pytest.mark.one_interceptor
@pytest.mark.parametrize(
    ("heuristic", "length", "memory", "overhead"),
    [
        ("neighborhood", 256, 32, 2.238),
        ("classes", 256, 32, 2.227),
        ("local", 256, 32, 8.682),
        ("neighborhood", 64, 16, 1.969),
    ],
)
def test_the_overhead_on_a_chain_is_that_of_the_authors_simulator(
    heuristic: Heuristic, length: int, memory: int, overhead: float
) -> None:
    assert round(Chain(memory, heuristic).run(length), 3) == overhead


SCRIPT = load_benchmark("rematerialization")
chain, bert, resnet = SCRIPT.chain, SCRIPT.bert, SCRIPT.resnet
train, checkpointed = SCRIPT.train, SCRIPT.checkpointed


def are_equal(found: Any, plain: Any) -> bool:
    """Return True if losses, parameters, gradients and buffers are the same bit for bit."""
    pairs = zip(found.values + found.buffers, plain.values + plain.buffers, strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def repeated(result: RematerializeResult) -> int:
    return sum(op.repeated for op in result.ops)


def test_a_chain_trains_within_budgets() -> None:
    plain = train(chain)
    watching = Rematerialize()
    assert are_equal(train(chain, watching), plain)
    free = watching.result()
    assert repeated(free) == 0
    # Beside the plain peak there are the states of random generators.
    assert plain.peak <= free.peak < 1.06 * plain.peak
    for part in (0.0, 0.3, 0.7):
        budget = int(free.floor + part * (free.peak - free.floor))
        tool = Rematerialize(budget)
        found = train(chain, tool)
        assert are_equal(found, plain)
        assert found.peak <= budget
        assert repeated(tool.result()) > 0


def train_within(make: Any, parts: Sequence[float]) -> list[int]:
    """Train within budgets from the smallest to the plain peak, and return how many operators ran
    again.
    """
    plain = train(make)
    watching = Rematerialize()
    assert are_equal(train(make, watching), plain)
    free = watching.result()
    again = []
    budgets = [free.floor + part * (plain.peak - free.floor) for part in parts]
    for budget in [*budgets, 0.6 * plain.peak]:
        tool = Rematerialize(int(budget))
        found = train(make, tool)
        assert are_equal(found, plain)
        assert found.peak <= budget
        again.append(repeated(tool.result()))
    return again


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize("make", [bert, resnet])
def test_models_train_within_budgets(make: Any) -> None:
    train_within(make, [0.0])


@pytest.mark.exhaustive
@pytest.mark.one_interceptor
@pytest.mark.parametrize("make", [chain, bert, resnet])
def test_models_train_within_ten_budgets(make: Any) -> None:
    again = train_within(make, [number / 9 for number in range(10)])
    # The paper's figure 2: the smaller the budget, the more is computed again.
    assert again[0] > again[4] > again[8]


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_checkpoints_give_the_same_gradients_for_more_or_less_memory() -> None:
    plain, other = train(bert), train(checkpointed(bert))
    assert other.equals(plain)
    assert other.peak < plain.peak
    tool = Rematerialize(int(0.6 * plain.peak))
    found = train(bert, tool)
    assert found.equals(other)
    assert found.peak < 0.6 * plain.peak
    # Checkpoints repeat all of the layers, and the tool what it must.
    assert 0 < repeated(tool.result()) < sum(op.calls for op in tool.result().ops)


def test_a_budget_that_is_too_small_is_an_error_and_the_advised_one_is_enough() -> None:
    parameters = sum(p.nbytes for p in chain()[0].parameters())
    small = Rematerialize(parameters)
    with pytest.raises(BudgetError, match="Run it once without a budget") as error:
        train(chain, small)
    assert isinstance(error.value, MemoryError)
    # One figure: that of the error is that of the title.
    (figure,) = re.findall(r"At least ([\d,]+) bytes are needed so far", str(error.value))
    assert f"at least {figure} bytes needed" in small.result().table().title
    watching = Rematerialize()
    plain = train(chain, watching)
    (advised,) = re.findall(r"at least ([\d,]+) bytes needed", watching.result().table().title)
    within = Rematerialize(advised)
    assert are_equal(train(chain, within), plain)
    assert within.result().peak <= int(advised.replace(",", ""))


@pytest.mark.one_interceptor
@pytest.mark.parametrize(
    ("selection", "measured"),
    [(None, 11), (amanda.select(op="*"), 11), (amanda.select(steps=[12]), 1)],
)
def test_without_a_budget_some_steps_are_measured(
    selection: amanda.Selection | None, measured: int
) -> None:
    """The first ten and the twentieth of 25, unless the user selects steps."""

    def steps() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        losses = []
        for _ in range(25):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    plain, tool = steps(), Rematerialize()
    with amanda.apply(tool.where(selection)):
        assert all(map(torch.equal, steps(), plain))
    result = tool.result()
    assert {op.calls for op in result.ops} == {measured}
    assert result.measured == ([*range(10), 20] if measured > 1 else [])
    title = result.table().title
    assert ("measured were 11 steps up to 20; whether others need more" in title) == (measured > 1)
    # Weights and biases, their gradients and momenta, and the output of the layer at least.
    assert 4 * (3 * 72 + 32) <= result.peak <= result.floor + 4 * 32 * 4


def test_a_larger_step_that_was_not_measured_is_found_by_selecting_all() -> None:
    def steps(tool: Rematerialize) -> RematerializeResult:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with amanda.apply(tool):
            for step in range(14):
                model(torch.ones(4096 if step == 12 else 4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return tool.result()

    sampled = steps(Rematerialize())
    assert sampled.measured == [*range(10)]
    large = 4096 * 8 * 4  # The output of a layer.
    assert sampled.peak < large
    with pytest.raises(BudgetError, match="Measure this step, too, by `--steps 0:`"):
        steps(Rematerialize(sampled.floor))
    every = steps(Rematerialize().where(amanda.select(steps=slice(0, None))))
    assert every.measured == []
    assert every.peak > large
    assert steps(Rematerialize(every.floor)).peak <= every.floor


@pytest.mark.one_interceptor
def test_the_users_of_memory_are_counted() -> None:
    facts: list[Facts | None] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: facts.append(context.facts))
    with amanda.apply(tool):
        x = torch.ones(3).exp()
    (*_, known) = facts
    assert known is not None
    alias, view = x.detach(), x[1:]
    assert known.users(x) == 3
    del alias, view
    assert known.users(x) == 1
    assert known.users(torch.eye(2).to_sparse()) is None


@pytest.mark.parametrize("heuristic", ["neighborhood", "classes", "local"])
def test_whatever_is_evicted_gradients_are_the_same(heuristic: Heuristic) -> None:
    plain = train(chain)
    tool = Rematerialize(0, heuristic, strict=False)
    assert are_equal(train(chain, tool), plain)
    assert repeated(tool.result()) > 40


def states_that_read_one_another(steps: int, size: int) -> list[torch.Tensor]:
    leaves = [torch.full((size,), value, requires_grad=True) for value in (0.3, 0.7)]
    a, b = leaves[0].exp(), leaves[1].exp()
    for _ in range(steps):
        a, b = torch.tanh(a * b), torch.sigmoid(a / b)
    (a + b).sum().backward()  # type: ignore[no-untyped-call]
    return [one.grad for one in leaves]  # type: ignore[misc]


def test_states_that_read_one_another_are_computed_once_for_each_that_is_saved() -> None:
    steps = 10
    plain = states_that_read_one_another(steps, 4)
    tool = Rematerialize(0, strict=False)
    with amanda.apply(tool):
        found = states_that_read_one_another(steps, 4)
    assert all(map(torch.equal, found, plain))
    operators = 4 * steps + 2
    assert operators < repeated(tool.result()) <= operators * operators


@pytest.mark.parametrize("heuristic", ["neighborhood", "classes", "local"])
def test_to_restore_a_value_each_is_computed_once_within_a_strict_budget(
    heuristic: Heuristic, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, size = 20, 4096
    plain = states_that_read_one_another(steps, size)
    measured = Rematerialize()
    with amanda.apply(measured):
        states_that_read_one_another(steps, size)
    limits = measured.result()
    computed: list[int] = []
    restore = Store._restore

    def counting(store: Store, value: Value) -> None:
        before = repeated(tool.result())
        restore(store, value)
        computed.append(repeated(tool.result()) - before)

    monkeypatch.setattr(Store, "_restore", counting)
    for share in (0.1, 0.2):
        budget = int(limits.floor + share * (limits.peak - limits.floor))
        tool = Rematerialize(budget, heuristic)
        with amanda.apply(tool):
            found = states_that_read_one_another(steps, size)
        assert all(map(torch.equal, found, plain))
        assert tool.result().peak <= budget
    assert computed
    assert max(computed) <= 4 * steps + 2


def test_what_runs_again_draws_and_casts_as_the_first_time() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        x = torch.randn(3, 5, 16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = layer(layer(x)).float().square().sum()
        loss.backward()
        after = torch.rand(3)  # The program's own numbers are the same, too.
        return [x.grad, after, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]

    plain = run()
    tool = Rematerialize(0, strict=False)
    with amanda.apply(tool):
        found = run()
    assert all(map(torch.equal, found, plain))
    assert repeated(tool.result()) > 10


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_are_updated_once(norm: Any) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        norms = [norm(4, affine=True, track_running_stats=True) for _ in range(2)]
        convs = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)]
        layers = [layer for pair in zip(convs, norms, strict=True) for layer in (*pair, nn.ReLU())]
        model = nn.Sequential(*layers)
        for _ in range(2):
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        return [*model.buffers(), *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    plain = run()
    tool = Rematerialize(0, strict=False)
    with amanda.apply(tool):
        assert all(map(torch.equal, run(), plain))
    assert repeated(tool.result()) > 0


def test_backward_twice_and_after_apply() -> None:
    def loss_of(layers: nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        return layers(torch.ones(4, 8)).square().sum()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 8), nn.Tanh())
    expected = torch.autograd.grad(loss_of(layers), list(layers.parameters()))
    with amanda.apply(Rematerialize(0, strict=False)):
        loss = loss_of(layers)
        first = torch.autograd.grad(loss, list(layers.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(layers.parameters()))
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, second, expected))


def test_a_program_with_checkpoints_keeps_its_own() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8))
        x = torch.randn(4, 8, requires_grad=True)
        for reentrant in (False, True):
            y = checkpoint(block, torch.tanh(x), use_reentrant=reentrant)
            torch.tanh(y).sum().backward()  # type: ignore[no-untyped-call]
        return [x.grad, *(p.grad for p in block.parameters())]  # type: ignore[list-item]

    plain = run()
    with amanda.apply(Rematerialize(0, strict=False)):
        assert all(map(torch.equal, run(), plain))


def test_a_saved_tensor_that_is_written_is_the_error_of_plain_pytorch() -> None:
    def run() -> None:
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.add_(1)
        y.sum().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run()
    for tool in (Rematerialize(), Rematerialize(0, strict=False)):
        with amanda.apply(tool), pytest.raises(RuntimeError, match="modified by an inplace"):
            run()


def test_a_parameter_that_is_written_before_backward_is_an_error_of_its_own() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with amanda.apply(Rematerialize(0, strict=False)):
        loss = second(torch.tanh(first(torch.ones(2, 4)))).sum()
        with torch.no_grad():
            first.bias.zero_()  # Plain backward does not read it.
        with pytest.raises(BudgetError, match="was written, or its memory freed, after"):
            loss.backward()


def test_a_parameter_whose_memory_is_freed_before_backward_is_an_error_of_its_own() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with amanda.apply(Rematerialize(0, strict=False)):
        loss = second(torch.tanh(first(torch.ones(2, 4)))).sum()
        # As FSDP does, which gathers it again for this layer's own backward.
        first.weight.untyped_storage().resize_(0)
        with pytest.raises(BudgetError, match="was written, or its memory freed, after"):
            loss.backward()


def test_a_value_whose_memory_is_freed_before_backward_is_an_error_of_its_own() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with amanda.apply(Rematerialize(0, strict=False)):
        hidden = first(torch.ones(2, 4))
        squares = hidden.square()  # Saves it, so that it is kept.
        loss = second(torch.tanh(hidden)).sum() + squares.sum()
        # As FSDP does with what it has gathered and reshaped.
        hidden.untyped_storage().resize_(0)
        with pytest.raises(BudgetError, match="was written, or its memory freed, after"):
            loss.backward()


def test_a_chain_longer_than_the_stack_of_python() -> None:
    def gradient(last: int) -> torch.Tensor:
        y = torch.ones(2, requires_grad=True)
        for number in range(last + 1):
            edge = get_gradient_edge(y) if number == last else None
            y = torch.sin(y)
        assert edge is not None
        (found,) = torch.autograd.grad(y.sum(), edge)
        return found

    plain = gradient(1500)
    tool = Rematerialize(0, strict=False)
    with amanda.apply(tool):
        # The saved input of the last operator was evicted, with all that it is computed from.
        assert torch.equal(gradient(1500), plain)
    assert repeated(tool.result()) >= 1500


def test_values_that_a_tool_has_edited_are_computed_from_the_edited_ones() -> None:
    def gradients(*tools: amanda.Tool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        with amanda.apply(*tools):
            model(torch.ones(4, 8)).sum().backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    tool = Rematerialize(0, strict=False)
    expected, found = gradients(Prune(0.5)), gradients(Prune(0.5), tool)
    assert all(map(torch.equal, found, expected))
    assert repeated(tool.result()) > 0


def test_budgets_are_bytes_or_text() -> None:
    assert [Rematerialize(b).budget for b in (5, "5", "1.5 kB", "2GiB")] == [5, 5, 1500, 2**31]
    with pytest.raises(ValueError, match="500MB"):
        Rematerialize("much")
    with pytest.raises(ValueError, match="neighborhood, classes, local"):
        Rematerialize(heuristic="oldest")  # type: ignore[arg-type]


class Overriding:
    """Not a tensor, and overrides PyTorch's functions."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls(function([one.values for one in args[0]], *args[1:], **(kwargs or {})))


def test_objects_that_override_operators_compute_them() -> None:
    x = torch.ones(3, requires_grad=True)
    with amanda.apply(Rematerialize(0, strict=False)):
        found = torch.stack([Overriding(x * 2), Overriding(x)])  # type: ignore[list-item]
        found.values.square().sum().backward()  # type: ignore[attr-defined]
    assert x.grad is not None
    assert x.grad.tolist() == [10.0] * 3


class Counted(torch.autograd.Function):
    """Doubles, and counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the double."""
        Counted.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the double."""
        return gradients[0] * 2


class Scripted(nn.Module):
    """Doubles, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the double."""
        self.calls += 1
        return x * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_of_the_program_runs_once() -> None:
    calls = []

    @torch.library.custom_op("amanda_rematerialize::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    double.register_autograd(lambda ctx, gradient: gradient * 2)
    Counted.calls = 0
    scripted: Any = torch.jit.script(Scripted())
    x = torch.ones(3, requires_grad=True)
    with amanda.apply(Rematerialize(0, strict=False)):
        for function in (Counted.apply, scripted, double):
            function(x.exp()).exp().sum().backward()
    assert (Counted.calls, int(scripted.calls), len(calls)) == (1, 1, 1)
