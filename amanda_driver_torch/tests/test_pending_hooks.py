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
from torch.utils.hooks import RemovableHandle

import amanda
from amanda_driver_torch._autograd.backward import Backward
from amanda_driver_torch._execution import execute

Log = list[Any]

W = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
B = torch.linspace(0, 1, 3).requires_grad_()
X = torch.linspace(0, 2, 16).reshape(2, 2, 4)


def numbers(values: Any) -> Any:
    return [None if value is None else value.tolist() for value in values]


def tool_of(log: Log, edit: bool = False) -> amanda.Tool:
    """Return a tool that analyses all backward ops, and halves some of their results."""
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

    tool.add_inst_for_op(lambda context: None)
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
    "left in between": left_in_between,
}


def forward_only(log: Log) -> None:
    """Run the forward passes of all programs, so that their ops have been seen."""
    for _ in range(2):
        for function in (model, repeat, write, NETWORK):
            function(X)


def logged(program: Callable[[Log], None], edit: bool) -> Log:
    """Return what a tool and the program's hooks see in two runs, and all gradients."""
    W.grad = B.grad = None
    log: Log = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with amanda.apply(tool_of(log, edit)):
            forward_only(log)
            for _ in range(2):
                program(log)
    grads = [W.grad, B.grad]
    W.grad = B.grad = None
    return [*log, numbers(grads)]


@pytest.mark.parametrize("edit", [False, True], ids=["looking", "editing"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_routines_are_called_as_if_all_nodes_had_been_hooked_in_the_forward_pass(
    program: str, edit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = logged(PROGRAMS[program], edit)
    monkeypatch.setattr(execute, "later_hooks", lambda *args, **kwargs: None)
    assert later == logged(PROGRAMS[program], edit)
    assert any(entry[0] == "before" for entry in later if isinstance(entry, tuple))


def test_a_program_that_never_runs_backward_gets_one_hook_for_each_op() -> None:
    with amanda.apply(tool_of([])):
        for _ in range(3):
            before = RemovableHandle.next_id
            model(X)
            hooks = RemovableHandle.next_id - before
    assert hooks == 5  # linear, tanh, mul, add, sum; the linear alone has six nodes and leaves.


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
