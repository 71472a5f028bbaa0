"""Steps of optimizers, loading of data, metrics and marked blocks are zones, not the model."""

# mypy: allow-untyped-calls, allow-untyped-defs, disable-error-code="no-any-return, unused-ignore"
# torch leaves optimizers untyped, and programs here are written as users write them.

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import data

import amanda
from amanda_core.errors import ToolError
from amanda_core.testing.kit.tools import tool

X = torch.ones(2, 4)


class Zones(amanda.Tool):
    """Counts executions by zone and type of operator, and collects names and ids."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, int]] = {}
        self.ids: dict[str, set[str]] = {}
        self.add_inst_for_op(self.count)

    def count(self, context: amanda.OpContext) -> None:
        zone, op_type = context.zone, context.op_type
        self.ids.setdefault(zone, set()).add(context.op_id)

        def add(*values: Any) -> None:
            found = self.calls.setdefault(zone, {})
            found[op_type] = found.get(op_type, 0) + 1

        context.insert_before_op(add, observe=True)


def types_of(program: Callable[[], object]) -> dict[str, set[str]]:
    zones = Zones()
    with amanda.apply(zones):
        program()
    return {zone: set(found) for zone, found in zones.calls.items()}


def product(g: torch.Tensor) -> torch.Tensor:
    return g @ g


class Written(torch.optim.Optimizer):
    """Calls a function, and names its variables as it likes."""

    def __init__(o, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(o, run: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if run is not None:
            with torch.enable_grad():
                loss = run()
        for group in o.param_groups:
            for p in group["params"]:
                p.sub_(product(p.grad))
        return loss


class Alone:
    """Not derived from torch's optimizers."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(this, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in this.parameters:
            p.sub_(product(p.grad))


class Captures(Written):
    """Its first argument is a cell."""

    @torch.no_grad()
    def step(o, run: Any = None) -> None:  # type: ignore[override]
        def update() -> None:
            for group in o.param_groups:
                for p in group["params"]:
                    p.sub_(product(p.grad))

        update()


class Learned(Written):
    """Runs a module to compute its update."""

    def __init__(o, params: Any) -> None:
        super().__init__(params)
        o.rule = nn.Linear(4, 4, bias=False)

    @torch.no_grad()
    def step(o, run: Any = None) -> None:  # type: ignore[override]
        for group in o.param_groups:
            for p in group["params"]:
                p.sub_(o.rule(p.grad).exp())


class Executions(amanda.Tool):
    """Counts executions of products and additions in steps of optimizers by op."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.add_inst_for_op(self.count)

    def count(self, context: amanda.OpContext) -> None:
        if context.zone != "optimizer" or context.op_type not in ("mul", "add_"):
            return
        op = context.op_id
        self.calls[op] = 0

        def add(*values: Any) -> None:
            self.calls[op] += 1

        context.insert_before_op(add, observe=True)


class Multiplying(torch.optim.Optimizer):
    """Multiplies two tensors, from one line.

    Args:
        keyword: Whether to pass them by keyword.
    """

    def __init__(self, keyword: bool) -> None:
        super().__init__([nn.Parameter(X)], {})
        self.given, self.keyword = [torch.ones(2, 4), torch.ones(2, 4)], keyword

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for value in self.given:
            torch.mul(X, other=value) if self.keyword else torch.mul(X, value)


def test_ops_of_repeated_steps_differ_by_line_and_parameter() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    executions = Executions()

    def look(*given: Any) -> None:
        torch.mul(X, X)

    with amanda.apply(executions):
        for number in range(6):
            first.grad, second.grad = torch.ones(2), torch.ones(2)
            parameters = [first, second][:: 1 if number % 4 < 2 else -1]
            optimizer = torch.optim.SGD(parameters, lr=0.5, foreach=False)
            optimizer.register_step_pre_hook(look)
            optimizer.step()
            for _ in range(3):
                optimizer.step()
    assert first.tolist() == second.tolist() == [1 - 6 * 4 * 0.5] * 2
    # Two parameters at two lines, and the product of the hook at its own line.
    assert sorted(executions.calls.values()) == [6, 6, 18, 18, 24]


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_a_plain_tensor_that_becomes_a_weight_is_another_op(keyword: bool) -> None:
    optimizer, executions = Multiplying(keyword), Executions()
    with amanda.apply(executions):
        for number in range(12):
            if number == 4:
                assert len(executions.calls) == 1
                optimizer.given[1].requires_grad = True
            elif number == 8:
                optimizer.given.reverse()
            optimizer.step()
    # Two others in each of four steps, then one in each of eight, and the weight in each of eight.
    assert sorted(executions.calls.values()) == [8, 16]


@pytest.mark.parametrize("kind", [Written, Alone, Captures, Learned])
def test_everything_that_a_step_calls_is_the_optimizers(kind: Any) -> None:
    net = nn.Linear(4, 4, bias=False)
    optimizer = kind(net.parameters())
    net(X).sum().backward()
    zones = Zones()
    with amanda.apply(zones):
        for _ in range(3):
            optimizer.step()
    assert "model" not in zones.calls
    found = zones.calls["optimizer"]
    assert found.pop("sub_") == 3
    assert found.pop("detach", 0) >= 0
    assert found in ({"matmul": 3}, {"linear": 3, "exp": 3})


@pytest.mark.parametrize("kind", [Written, Alone, lambda p: torch.optim.LBFGS(p, max_iter=2)])
@pytest.mark.parametrize("named", [False, True])
def test_closure_of_a_step_is_the_model(kind: Any, named: bool) -> None:
    net = nn.Linear(4, 4, bias=False)
    optimizer = kind(net.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(X).tanh().sum()
        loss.backward()
        return loss

    def program() -> None:
        if kind is Written and named:
            optimizer.step(run=closure)
        elif named:
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)

    found = types_of(program)
    assert found["model"] >= {"linear", "tanh", "sum"}
    assert not found["optimizer"] & {"linear", "tanh"}
    assert found["optimizer"] & {"sub_", "add_"}


def test_a_function_called_by_the_model_and_the_optimizer_is_two_operators() -> None:
    net, zones = nn.Linear(4, 4, bias=False), Zones()
    optimizer = Written(net.parameters())
    with amanda.apply(zones):
        for _ in range(2):
            (net(X) @ product(net.weight)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert zones.calls["model"]["matmul"] == 4
    assert zones.calls["optimizer"]["matmul"] == 2
    assert not zones.ids["model"] & zones.ids["optimizer"]


def test_a_step_that_raises_ends_its_zone() -> None:
    class Fails(Written):
        def step(o, run: Any = None) -> None:  # type: ignore[override]
            X.exp()
            raise KeyError

    def program() -> None:
        with pytest.raises(KeyError):
            Fails([nn.Parameter(X)]).step()
        X.cos()

    found = types_of(program)
    assert "cos" in found["model"]
    assert "exp" in found["optimizer"]


def test_schedulers_averages_scalers_and_clipping_are_the_optimizers() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    scaler = torch.amp.GradScaler("cpu")

    class Schedule(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(it) -> Any:
            return [float(torch.tensor(0.1).erf())]

    schedule = Schedule(optimizer)

    def program() -> None:
        scaler.scale(net(X).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(net)

    found = types_of(program)
    assert found["model"] == {"linear", "sum"}
    assert found["optimizer"] >= {"erf", "clamp", "_amp_update_scale_"}
    assert types_of(lambda: average(X)) == {"model": {"linear"}}


def test_an_average_of_weights_is_no_part_of_the_model() -> None:
    class Average:
        """Has the methods of the averages of diffusers."""

        def __init__(self, net: nn.Module) -> None:
            self.shadow_params = [p.detach().clone() for p in net.parameters()]

        @torch.no_grad()
        def step(self, parameters: Any) -> None:
            for shadow, parameter in zip(self.shadow_params, parameters, strict=True):
                shadow.sub_(0.1 * (shadow - parameter))

        def copy_to(self, parameters: Any) -> None: ...

        def store(self, parameters: Any) -> None: ...

        def restore(self, parameters: Any) -> None: ...

    net = nn.Linear(4, 4)
    average = Average(net)
    found = types_of(lambda: (net(X), average.step(net.parameters())))
    assert found["model"] == {"linear"}
    assert found["optimizer"] >= {"sub", "mul", "sub_"}


def test_loading_of_data_has_a_zone_although_it_runs_a_module() -> None:
    class Squares(data.Dataset[torch.Tensor]):
        features = nn.Linear(4, 4)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.features(X[index]).detach().exp()

    found = types_of(lambda: [batch.cos() for batch in data.DataLoader(Squares(), 2)])
    assert found["model"] == {"cos"}
    assert found["data"] >= {"linear", "exp", "stack"}


def test_metrics_of_a_known_library_are_not_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("torchmetrics.regression")
    source = "def update(metric, value): return metric.total.add_(value.square().mean())"
    exec(source, vars(library))
    monkeypatch.setitem(sys.modules, library.__name__, library)

    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return vars(library)["update"](self, value)  # type: ignore[no-any-return]

    metric = Metric()
    found = types_of(lambda: metric(X.tanh()))
    assert found == {"model": {"tanh"}, "metrics": {"square", "mean", "add_"}}


def test_a_program_marks_a_zone_of_its_own() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    zones = Zones()
    with amanda.apply(zones):
        net(X)
        for _ in range(2):
            with amanda.zone("metrics"):
                product(net(X) @ X.T)
                with amanda.zone("model"):
                    X.sin()
        X.cos()
    assert zones.calls["model"] == {"linear": 1, "relu": 1, "sin": 2, "cos": 1}
    assert zones.calls["metrics"].pop("matmul") == 4
    assert zones.calls["metrics"].pop("linear") == 2
    assert zones.calls["metrics"]["relu"] == 2
    assert not zones.ids["model"] & zones.ids["metrics"]


def test_a_zone_inside_a_module_keeps_the_modules_path() -> None:
    class Noted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with amanda.zone("metrics"):
                x.detach().square()
            return x.exp()

    found: set[tuple[str, str, str]] = set()
    net = nn.Sequential(Noted(), Noted())

    @tool
    def look(context: amanda.OpContext) -> None:
        found.add((context.module_path, context.op_type, context.zone))

    with amanda.apply(look):
        net(X)
        net(X)
    assert {entry for entry in found if entry[1] != "detach"} == {
        (path, *rest) for path in ("0", "1") for rest in (("square", "metrics"), ("exp", "model"))
    }


def test_a_zone_begins_before_apply_and_ends_after_it() -> None:
    zones = Zones()
    with amanda.zone("warm-up"):
        with amanda.apply(zones):
            X.sin()
        X.cos()
    with amanda.apply(zones):
        with amanda.zone("later"):
            handle = amanda.attach(Zones())
            X.exp()
        handle.remove()
        X.tan()
    assert {zone: set(found) for zone, found in zones.calls.items()} == {
        "warm-up": {"sin"},
        "later": {"exp"},
        "model": {"tan"},
    }


def test_a_zone_that_began_before_apply_ends_inside_it() -> None:
    zones = Zones()
    with amanda.zone("warm-up"):
        handle = amanda.attach(zones)
        X.sin()
    X.cos()
    handle.remove()
    assert {zone: set(found) for zone, found in zones.calls.items()} == {
        "warm-up": {"sin"},
        "model": {"cos"},
    }


def test_a_decorated_function_is_a_zone_and_needs_no_tools() -> None:
    @amanda.zone("metrics")
    def accuracy(y: torch.Tensor) -> torch.Tensor:
        return y.mean()

    assert accuracy(X) == 1.0
    assert types_of(lambda: accuracy(X)) == {"metrics": {"mean"}}
    with pytest.raises(ToolError, match="name of a zone"):
        amanda.zone("")


def test_ranges_of_the_profiler_are_as_found_afterwards() -> None:
    kind = torch.autograd.profiler.record_function
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = dict(vars(kind)), [dict(one) for one in hooks]
    with amanda.apply(Zones()):
        with kind("a range of the user's"):
            X.sin()

        @torch.jit.script
        def scripted(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.profiler.record_function("scripted"):
                return x + 1

        assert scripted(X)[0, 0] == 2.0
    assert (dict(vars(kind)), [dict(one) for one in hooks]) == before


def counting_backend(runs: list[int]) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            runs.append(len(gm.graph.nodes))
            return gm(*values)

        return run

    return backend


@pytest.mark.one_interceptor
@pytest.mark.parametrize("kind", [torch.optim.SGD, Written])
def test_a_compiled_step_stays_compiled(kind: Any, fresh_compiler: None) -> None:
    runs: list[int] = []
    zones = Zones()
    # Without it a compiled function runs eagerly where gradients are recorded.
    zones.add_inst_for_op(lambda context: None, backward=True)
    net = nn.Linear(4, 4, bias=False)
    optimizer = kind(net.parameters())
    step = torch.compile(optimizer.step, backend=counting_backend(runs))
    with amanda.apply(zones):
        for _ in range(2):
            net(X).sum().backward()
            step()
    assert len(runs) >= 2
    assert zones.calls["optimizer"]
    assert set(zones.calls["model"]) == {"linear", "sum"}


@pytest.mark.one_interceptor
def test_a_compiled_function_of_a_step_is_the_optimizers(fresh_compiler: None) -> None:
    runs: list[int] = []
    compiled = torch.compile(product, backend=counting_backend(runs))

    class Muon(Written):
        def step(o, run: Any = None) -> None:  # type: ignore[override]
            for p in o.param_groups[0]["params"]:
                p.data.sub_(compiled(p.grad))

    net, zones = nn.Linear(4, 4, bias=False), Zones()
    zones.add_inst_for_op(lambda context: None, backward=True)
    optimizer = Muon(net.parameters())
    with amanda.apply(zones):
        net(X).sum().backward()
        optimizer.step()
        optimizer.step()
    assert len(runs) == 2
    assert zones.calls["optimizer"]["matmul"] == 2
    assert set(zones.calls["model"]) == {"linear", "sum"}
