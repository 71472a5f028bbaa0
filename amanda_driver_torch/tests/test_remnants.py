"""Nothing of the driver stays alive: no context, session or tool, through any graph."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch._higher_order_ops
import torch._tensor_str
import torch.utils.checkpoint
from torch import nn

import amanda
from amanda_core.testing.kit.tools import Everywhere, at_inputs
from amanda_driver_torch.threads.state import STATE


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.randn(2, 3)


class Boom(Exception):
    pass


def boom(*values: Any) -> Any:
    raise Boom


def everything() -> amanda.Tool:
    return Everywhere(lambda *values: None)


# Nothing stays alive.


def remnants(backward: bool, fail: bool = False) -> dict[str, weakref.ref[Any]]:
    """Return references to everything involved, after it was dropped."""
    found: dict[str, weakref.ref[Any]] = {}
    net, made = model(), everything()

    def remember(context: amanda.OpContext) -> None:
        found[f"context {context.name}"] = weakref.ref(context)

    made.add_inst_for_op(remember)
    made.add_inst_for_op(remember, backward=True)
    tools = [made, at_inputs("relu", boom, [0])] if fail else [made]
    try:
        with amanda.apply(*tools) as handle:
            assert handle.session is not None
            assert STATE.attachment is not None
            found["session"] = weakref.ref(handle.session)
            found["attachment"] = weakref.ref(STATE.attachment)
            out = net(X.clone().requires_grad_()).sum()
            if backward:
                out.backward()
    except Boom:
        pass
    found["tool"], found["model"] = weakref.ref(made), weakref.ref(net)
    found["weight"], found["output"] = weakref.ref(next(net.parameters())), weakref.ref(out)
    return found


def test_parameters_get_no_dictionary() -> None:
    """One that is made stays, and CPython looks up methods of the parameter more slowly with it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with amanda.apply(everything()):
        for _ in range(2):
            (net(X) + next(net.parameters())[0, 0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one in net.parameters():
        assert not [held for held in gc.get_referents(one) if type(held) is dict]
    assert vars(one) == {}
    assert [type(held) for held in gc.get_referents(one)].count(dict) == 1  # It would be found.


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False], ids=["backward-run", "backward-not-run"])
@pytest.mark.parametrize("fail", [True, False], ids=["failed", "left"])
def test_nothing_is_alive_once_all_is_let_go(backward: bool, fail: bool) -> None:
    found = remnants(backward, fail)
    gc.collect()
    assert len(found) > 8
    assert [name for name, reference in found.items() if reference() is not None] == []


def test_graph_that_is_kept_keeps_neither_tools_nor_contexts() -> None:
    contexts: list[weakref.ref[Any]] = []
    net, made = model(), everything()
    made.add_inst_for_op(lambda context: contexts.append(weakref.ref(context)))
    with amanda.apply(made) as handle:
        assert handle.session is not None
        session = weakref.ref(handle.session)
        out = net(X).sum()
    left = weakref.ref(made)
    del made, handle
    gc.collect()
    assert contexts
    references: list[weakref.ref[Any]] = [session, left, *contexts]
    assert not any(reference() is not None for reference in references)
    assert out.requires_grad
