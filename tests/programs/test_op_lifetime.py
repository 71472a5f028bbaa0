"""Contexts are bounded in number, die with their models, and persist for the same tools."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core import OpContext

from .architectures import gpt2
from .tracing import Trace, contexts_of

# Bounds.


@pytest.mark.slow
def test_contexts_stay_flat_over_a_thousand_training_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    tool = amanda.Tool()
    analysed: list[str] = []
    for backward in (False, True):
        for outputs in (False, True):
            tool.add_inst_for_op(lambda c: analysed.append(c.name), backward, outputs)
    counts: dict[int, tuple[int, int]] = {}
    objects: dict[int, int] = {}
    with amanda.apply(tool) as handle:
        for step in range(1, 1001):
            loss = model(torch.randn(5, 4)).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step in (5, 100, 1000):
                gc.collect()
                counts[step] = contexts_of(handle), len(analysed)
                objects[step] = len(gc.get_objects())
    assert counts[5][0] > 30
    assert counts[5] == counts[100] == counts[1000]
    # Less than one for ten steps; what other tests left may go meanwhile.
    assert objects[1000] - objects[100] < 90


@pytest.fixture(scope="module")
def generator() -> nn.Module:
    torch.manual_seed(0)
    return gpt2(n_positions=256).eval()


@pytest.mark.slow
def test_contexts_stay_flat_over_generation(generator: Any) -> None:
    prompt = torch.tensor([[5, 7, 9]])
    counts = []
    with amanda.apply(Trace()) as handle, torch.no_grad():
        for tokens in (20, 200):
            output = generator.generate(
                prompt, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
            )
            assert output.shape == (1, 3 + tokens)
            counts.append(contexts_of(handle))
    assert counts[0] > 100
    assert counts[0] == counts[1]


def test_contexts_stay_flat_over_a_loop_with_a_cache(generator: nn.Module) -> None:
    ids, cache = torch.tensor([[5, 7, 9]]), None
    counts = []
    tool = Trace()
    sequences = []
    with amanda.apply(tool) as handle, torch.no_grad():
        for _ in range(200):
            tool.take()
            output = generator(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
            counts.append(contexts_of(handle))
            sequences.append(tool.take())
    # The first call reads the prompt, all others one token.
    assert counts[2] == counts[-1]
    assert sequences[2:] == [sequences[1]] * 198


# Models that come and go, tools that come again.


class Mask(amanda.Tool):
    """Keeps a mask of the weight under a key of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type != "linear":
            return
        self.found.append("mask" in context)
        if "mask" not in context:
            context["mask"] = (context.get_inputs()[1] > 0).float()
        context.insert_before_op(self.prune, inputs=[1], context=context)

    def prune(self, weight: torch.Tensor, context: OpContext) -> torch.Tensor:
        mask = context["mask"]
        assert isinstance(mask, torch.Tensor)
        return weight * mask


def pruned(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a copy whose weights were masked in place."""
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("weight"):
                parameter.mul_(parameter > 0)
    output = reference(x)
    assert isinstance(output, torch.Tensor)
    return output


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_])
def test_objects_stay_flat_over_weights_made_again(make: Any) -> None:
    def multiply(times: int) -> int:
        for _ in range(times):
            torch.autograd.backward(nn.functional.linear(x, make(torch.ones(4, 4))).sum())
        gc.collect()
        return len(gc.get_objects())

    x = torch.ones(2, 4)
    with amanda.apply(Trace()):
        found = [multiply(500) for _ in range(4)]
    assert found[3] - found[1] < 500  # 1,000 weights were made meanwhile.


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["one apply", "applied again"])
def test_a_dead_models_contexts_go_with_it(again: bool) -> None:
    x = torch.randn(5, 3)
    tool = Mask()
    applied = amanda.attach(tool)
    counts = []
    for _ in range(5):
        model = net()
        with amanda.disabled():
            expected = pruned(model, x)
        assert torch.equal(model(x), expected)
        counts.append(contexts_of(applied))
        del model
        gc.collect()
        if again:
            applied.remove()
            applied = amanda.attach(tool)
    applied.remove()
    assert counts == counts[:1] * 5
    assert tool.found == [False] * 10


@pytest.mark.slow
def test_a_model_that_lives_on_keeps_its_contexts() -> None:
    x = torch.randn(5, 3)
    tool = Mask()
    kept = net()
    expected = pruned(kept, x)
    with amanda.apply(tool):
        kept(x)
        for _ in range(3):
            net()(x)
            gc.collect()
        with torch.no_grad():
            for parameter in kept.parameters():
                parameter.neg_()
        # The mask is that of the first analysis.
        assert not torch.equal(kept(x), expected)
        with torch.no_grad():
            for parameter in kept.parameters():
                parameter.neg_()
        assert torch.equal(kept(x), expected)
    assert tool.found == [False] * (2 + 3 * 2)


def test_a_tool_applied_again_resumes_in_whatever_order() -> None:
    models = [net() for _ in range(3)]
    tool = Trace("linear")
    x = torch.ones(3)
    calls: list[dict[int, list[int]]] = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        with amanda.apply(tool):
            calls.append({})
            for number in order:
                models[number](x)
                calls[-1][number] = tool.take()
    assert len(tool.analysed) == len(set(tool.analysed)) == 6
    assert calls[1] == calls[0]
    assert calls[2] == {number: calls[0][number] for number in (1, 2)}


def test_a_tool_applied_again_keeps_its_masks() -> None:
    x = torch.randn(5, 3)
    models = [net() for _ in range(2)]
    expected = [pruned(model, x) for model in models]
    tool = Mask()
    for order in ([0, 1], [1, 0]):
        with amanda.apply(tool):
            for number in order:
                assert torch.equal(models[number](x), expected[number])
    assert tool.found == [False] * 4


def test_a_replaced_submodule_hands_nothing_on() -> None:
    """The id stays, it is the same place in the program; the mask was of the old weight."""
    model, x = net(), torch.randn(5, 3)
    tool = Mask()
    with amanda.apply(tool):
        model(x)
        model[0] = nn.Linear(3, 4)
        gc.collect()
        with amanda.disabled():
            expected = pruned(model, x)
        assert torch.equal(model(x), expected)
    assert tool.found == [False] * 3


ENDING = """
import sys
import torch, amanda
from amanda_tools.memory import Memory
from amanda_tools.prune import Prune
from amanda_tools.rematerialize import Rematerialize

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
kept = [net]
for tool in (Prune(0.5), Memory(), Rematerialize()):
    with amanda.apply(tool) as handle:
        y = net(torch.ones(1, 4, requires_grad=True))
        y.sum().backward(retain_graph=True)
    kept += [tool, handle, y]
# A module that ends later than ours, which something refers to.
torch.kept = [kept, *(one for name, one in sys.modules.items() if name.startswith("amanda"))]
"""


def test_nothing_is_said_where_tensors_live_until_the_interpreter_ends() -> None:
    found = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
