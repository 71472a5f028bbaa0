"""Backward ops that are hooked when a pass reaches them are seen as if hooked before."""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_driver_torch import interceptor
from amanda_driver_torch.execution import execute, pending_hooks
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.operator_call import OperatorCall

Log = list[Any]

W = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
B = torch.linspace(0, 1, 3).requires_grad_()
X = torch.linspace(0, 2, 16).reshape(2, 2, 4)


def numbers(values: Any) -> Any:
    return [None if value is None else value.tolist() for value in values]


def tool_of(log: Log, edit: bool = False, aligned: bool = False) -> amanda.Tool:
    """Return a tool that analyses all backward ops.

    Args:
        log: Where it notes what it sees.
        edit: Halve some of the results of backward ops, and gradients of ops as a whole.
        aligned: Look at the gradients of ops as a whole, too.
    """
    tool = amanda.Tool()

    def before(*grads: Any, name: str) -> None:
        log.append(("before", name, numbers(grads)))

    def after(*grads: Any, name: str) -> Any:
        log.append(("after", name, numbers(grads)))
        if not edit or "Add" not in name:
            return None
        return [None if grad is None else grad / 2 for grad in grads]

    def analysis(context: amanda.OpContext) -> None:
        name = context["type"], context.get_op_id(), context.get_backward_op_id()
        log.append(("analysed", name))
        label = str(context.get_op())
        context.insert_before_backward_op(before, name=label)
        context.insert_after_backward_op(after, name=label)

    def whole(context: amanda.OpContext) -> None:
        if not aligned:
            return
        # The gradients of a view that was split cannot be edited.
        edits = edit and "split" not in context.name

        def arriving(*grads: Any) -> Any:
            log.append(("arriving", context.name, numbers(grads)))
            return [None if grad is None else grad / 2 for grad in grads] if edits else None

        def given(*grads: Any) -> Any:
            log.append(("given", context.name, [None if g is None else True for g in grads]))

        context.insert_before_backward_op(arriving, observe=not edits)
        context.insert_after_backward_op(given, observe=True)

    tool.add_inst_for_op(whole)
    tool.add_inst_for_op(analysis, backward=True, require_outputs=False)
    tool.add_inst_for_op(
        lambda context: log.append(("analysed after", str(context.get_op()))),
        backward=True,
        require_outputs=True,
    )
    return tool


def project(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, W, B)


def model(x: torch.Tensor) -> torch.Tensor:
    hidden = project(x)
    return (hidden.tanh() + hidden * hidden).sum()


def repeat(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.linear(F.linear(x, W), W.t())
    return x.sum()


def write(x: torch.Tensor) -> torch.Tensor:
    x = F.linear(x, W)
    x[0].mul_(2)
    x[:, 1].add_(1)
    first, second = x.unbind(1)
    return x.sum() + first.exp().mean() + second.mean()


class Both(torch.autograd.Function):
    """A function with two outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        return first * 2 + second * 3


LSTM = nn.LSTM(3, 2)


def several(x: torch.Tensor) -> torch.Tensor:
    """Run ops with several outputs, made by one node or by many, and ops that write."""
    first, second = torch.chunk(F.linear(x, W, B), 2, -1)
    first = F.relu(first + 1, inplace=True)
    largest, _ = second.max(-1)
    upper, lower = torch.tensor_split(x * W[0], 2, 1)
    once, twice = Both.apply(upper)
    sequence, (state, _) = LSTM(F.linear(once, W))
    rows = torch.zeros(2, 3)
    rows[0] = B
    rows[1].add_(B)
    grid = torch.ops.aten.mul.Tensor(rows, rows)
    parts = (largest, lower, twice, sequence, state, grid)
    return torch.stack([first.sum(), *(part.sum() for part in parts)]).sum()


class Network(nn.Module):
    """Layers, one of which is called twice, and a weight that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.inner(self.inner(self.first(x)))).sum()


torch.manual_seed(0)
NETWORK = Network()


def in_modules(log: Log) -> None:
    NETWORK(X).backward()
    log.append(numbers(parameter.grad for parameter in NETWORK.parameters()))
    NETWORK.zero_grad()


def plain(log: Log) -> None:
    model(X).backward()


def several_passes(log: Log) -> None:
    loss = model(X)
    for _ in range(3):
        loss.backward(retain_graph=True)
    (W.sum() * loss).backward()


def some_inputs(log: Log) -> None:
    for _ in range(3):
        log.append(numbers(torch.autograd.grad(model(X), [B])))
    log.append(numbers(torch.autograd.grad(model(X), [W])))


def gradients_of_gradients(log: Log) -> None:
    for _ in range(2):
        first = torch.autograd.grad(model(X), [W], create_graph=True)[0]
        log.append(numbers(torch.autograd.grad(first.pow(2).sum(), [W])))


def hooks_of_the_program(log: Log) -> None:
    with amanda.disabled():  # It calls an operator.
        early: Any = torch.autograd.graph.get_gradient_edge(B).node
    early.register_hook(lambda *grads: log.append("early on a leaf"))
    hidden = project(X)
    loss = hidden.tanh().sum()
    node: Any = hidden.grad_fn
    # The linear's nodes, from the one of its output on, and a leaf.
    for number in range(3):
        assert node is not None
        name = f"{number}: {node.name()}"
        node.register_prehook(lambda grads, name=name: log.append(("program before", name)))
        node.register_hook(
            lambda results, grads, name=name: log.append(("program after", name, numbers(results)))
        )
        followers = [following for following, _ in node.next_functions if following is not None]
        if not followers:
            break
        node = followers[0]
    hidden.register_hook(lambda grad: grad * 3)
    loss.backward(retain_graph=True)
    loss.backward()


def checkpointed(reentrant: bool) -> Callable[[Log], None]:
    def run(log: Log) -> None:
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).backward()
        log.append(numbers([x.grad]))

    return run


def in_another_thread(log: Log) -> None:
    loss = model(X)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def nodes_of_another_thread(log: Log) -> None:
    """Use nodes of two threads, which may have the same sequence numbers."""
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(model(X).tanh()))
    thread.start()
    thread.join()
    (model(X) * made[0]).backward()


def compiled_autograd(log: Log) -> None:
    loss = model(X)
    with compiled._enable(lambda graph: graph):
        loss.backward()


def disabled_and_enabled(log: Log) -> None:
    loss = model(X)
    with amanda.disabled():
        loss.backward(retain_graph=True)
    log.append("enabled")
    loss.backward()


def used_twice(log: Log) -> None:
    x = X.clone().requires_grad_()
    repeat(x).backward()
    log.append(numbers([x.grad]))


def views_and_in_place(log: Log) -> None:
    write(X).backward()


def several_outputs(log: Log) -> None:
    several(X).backward()


def some_inputs_of_several(log: Log) -> None:
    for tensor in (B, W, B):
        log.append(numbers(torch.autograd.grad(several(X), [tensor])))
    several(X).backward()


def left_in_between(log: Log) -> None:
    loss = model(X)
    with amanda.apply(tool_of(log)):
        inner = model(X)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        (loss + inner).backward()
    log.append(len(heard))


PROGRAMS = {
    "plain": plain,
    "in modules": in_modules,
    "several passes": several_passes,
    "some inputs": some_inputs,
    "gradients of gradients": gradients_of_gradients,
    "hooks of the program": hooks_of_the_program,
    "checkpoint": checkpointed(reentrant=False),
    "reentrant checkpoint": checkpointed(reentrant=True),
    "another thread": in_another_thread,
    "nodes of another thread": nodes_of_another_thread,
    "compiled autograd": compiled_autograd,
    "disabled and enabled": disabled_and_enabled,
    "used twice": used_twice,
    "views and in place": views_and_in_place,
    "several outputs": several_outputs,
    "some inputs of several": some_inputs_of_several,
    "left in between": left_in_between,
}


def forward_only(log: Log) -> None:
    """Run the forward passes of all programs, so that their ops have been seen."""
    for _ in range(2):
        for function in (model, repeat, write, several, NETWORK):
            function(X)


def logged(program: Callable[[Log], None], edit: bool, aligned: bool) -> Log:
    """Return what a tool and the program's hooks see in two runs, and all gradients."""
    W.grad = B.grad = None
    log: Log = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with amanda.apply(tool_of(log, edit, aligned)):
            forward_only(log)
            for _ in range(2):
                program(log)
    grads = [W.grad, B.grad]
    W.grad = B.grad = None
    return [*log, numbers(grads)]


@pytest.mark.parametrize(
    ("edit", "aligned"),
    [
        pytest.param(False, False, id="looking"),
        pytest.param(True, False, id="editing"),
        pytest.param(False, True, id="looking at whole ops, too", marks=pytest.mark.slow),
        pytest.param(True, True, id="editing whole ops, too", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_routines_are_called_as_if_all_nodes_had_been_hooked_in_the_forward_pass(
    program: str, edit: bool, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = logged(PROGRAMS[program], edit, aligned)
    monkeypatch.setattr(pending_hooks, "later_hooks", lambda *args, **kwargs: None)
    assert later == logged(PROGRAMS[program], edit, aligned)
    assert any(entry[0] == "before" for entry in later if isinstance(entry, tuple))


def settled(program: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the driver plans or hooks anew in the eighth run of a program."""
    found: list[str] = []
    for module, name in (
        (execute, "compiled"),
        (pending_hooks, "later_hooks"),
        (pending_hooks, "node_plans"),
    ):
        original = getattr(module, name)

        def counted(*args: Any, original: Any = original, name: str = name) -> Any:
            plan = original(*args)
            if plan is not None:
                (call,) = (one for one in args if isinstance(one, OperatorCall))
                found.append(f"{name} {call.record.site.name}")
            return plan

        monkeypatch.setattr(module, name, counted)
    for _ in range(8):
        found.clear()
        program()
    return found


def planning_tools(kind: str) -> list[amanda.Tool]:
    """Return tools that plan something at each op."""
    tool = amanda.Tool()

    def analysis(context: amanda.OpContext) -> None:
        if "looks" in kind:
            context.insert_before_op(lambda *values: None, observe=True)
            context.insert_after_op(lambda *values: None, observe=True)
        if "edits" in kind and context["type"] == "linear":
            context.insert_before_op(lambda value: value * 1, inputs=[0])
            context.insert_after_op(lambda value: value * 1, outputs=[0])
        observe = "edits" not in kind or "split" in context.name
        context.insert_before_backward_op(lambda *grads: None, observe=observe)
        if context["type"] in ("linear", "mul", "max"):
            context.insert_after_backward_op(lambda grad: None, grad_inputs=[0], observe=observe)

    tool.add_inst_for_op(analysis if "whole ops" in kind else lambda context: None)
    return [tool, tool_of([])] if "nodes" in kind else [tool]


@pytest.mark.parametrize(
    "kind",
    [
        "nodes",
        "whole ops",
        "nodes, whole ops",
        "nodes, whole ops; looks",
        "nodes, whole ops; edits",
        "nodes, whole ops; looks, edits",
    ],
)
def test_a_program_that_never_runs_backward_settles(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with amanda.apply(*planning_tools(kind)):
        assert settled(lambda: (model(X), several(X), write(X)), monkeypatch) == []


def test_a_program_that_differentiates_by_some_inputs_only_settles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if interceptor().name != "native":
        pytest.skip("plans of nodes that were analysed in part are native")
    with amanda.apply(tool_of([])):
        assert settled(lambda: torch.autograd.grad(model(X), [B]), monkeypatch) == []


@pytest.mark.parametrize("aligned", [False, True], ids=["nodes", "whole ops, too"])
def test_the_first_backward_pass_may_come_late(aligned: bool) -> None:
    logs: list[Log] = []
    for runs in (1, 100):
        W.grad = B.grad = None
        log: Log = []
        with amanda.apply(tool_of(log, edit=True, aligned=aligned)):
            for _ in range(runs):
                loss = several(X) + model(X)
            log.clear()
            loss.backward()
        logs.append([*log, numbers([W.grad, B.grad])])
    W.grad = B.grad = None
    assert logs[0] == logs[1]
    assert {entry[0] for entry in logs[0] if isinstance(entry, tuple)} >= {"analysed", "before"}


def test_routines_run_in_the_same_order_in_each_iteration() -> None:
    logs: list[Log] = []
    log: Log = []
    with amanda.apply(tool_of(log, edit=True, aligned=True)):
        for _ in range(6):
            log.clear()
            model(X).backward()
            logs.append([entry for entry in log if not entry[0].startswith("analysed")])
    W.grad = B.grad = None
    assert logs[1:] == logs[:1] * 5
    assert {entry[0] for entry in logs[0]} == {"arriving", "given", "before", "after"}


def hooks_of(node: Any, seen: set[Any]) -> int:
    """Return the number of hooks on the nodes of a graph."""
    if node is None or node in seen:
        return 0
    seen.add(node)
    found = 0
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *grads: None)  # The only way to read the hooks.
        found += len(handle.hooks_dict_ref()) - 1
        handle.remove()
    return found + sum(hooks_of(following, seen) for following, _ in node.next_functions)


def test_a_program_that_never_runs_backward_gets_one_hook_for_each_op() -> None:
    with amanda.apply(tool_of([])):
        for _ in range(3):
            loss = model(X)
    # linear, tanh, mul, add, sum; the linear alone has six nodes and leaves.
    assert hooks_of(loss.grad_fn, set()) == 5


def test_the_warning_of_a_late_backward_pass_is_given_once() -> None:
    with amanda.apply(tool_of([])):
        for _ in range(3):
            loss = model(X)
    with pytest.warns(amanda.AmandaWarning, match="after `apply` ended") as heard:
        loss.backward()
    assert len(heard) == 1
    W.grad = B.grad = None


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_fault_of_the_driver_at_such_a_hook_follows_the_policy(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise LookupError("a fault in the driver")

    model(X).backward()
    assert W.grad is not None
    expected, W.grad = W.grad, None
    with amanda.apply(tool_of([]), on_driver_error=policy):
        for _ in range(3):
            loss = model(X)
        monkeypatch.setattr(Backward, "hook_pending", broken)
        if policy == "raise":
            with pytest.raises(LookupError, match="a fault in the driver") as caught:
                loss.backward()
            assert "an error of Amanda's driver" in "".join(caught.value.__notes__)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss.backward()
            torch.testing.assert_close(W.grad, expected, rtol=0, atol=0)
    W.grad = B.grad = None
