"""Pruning compared with references: the same model, pruned by hand, without Amanda.

A reference is a copy of the model whose weights were masked in place. Inserted code is not
differentiated, so the op's own backward sees the masked weight, and its gradient goes straight
through to the dense one. If autodiff is enabled, the reference is parametrized with the mask
instead. Everything is compared bit for bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import amanda
from amanda_core import OpContext

from .architectures import ARCHITECTURES, Architecture, bert, loss_of
from .bits import Bits, bits_of, differences, state_of

STEPS = 3
WITH_WEIGHTS = ("linear", "conv1d", "conv2d", "conv_transpose2d")


_CASES = {a.name: a for a in ARCHITECTURES}
# In BERT the decoder's weight is the embedding's: masked at the decoder, it is still dense at the
# embedding, which a reference with one masked weight is not.
_CASES["bert"] = Architecture(
    "bert", functools.partial(bert, tie_word_embeddings=False), _CASES["bert"].feed
)
CASES = [
    *(_CASES[name] for name in ("bert", "vit", "resnet", "detr", "unet", "encoder")),
    pytest.param(_CASES["efficientnet"], marks=pytest.mark.slow),
]


def mask_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a mask of the larger half of the weights."""
    return (weight.abs() > weight.abs().median()).to(weight.dtype)


class Prune(amanda.Tool):
    """Masks the weight of every convolution and linear layer, and optionally its gradient."""

    def __init__(self, gradients: bool = False) -> None:
        super().__init__()
        self.gradients = gradients
        self.masked: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type not in WITH_WEIGHTS:
            return
        mask = mask_of(context.get_inputs()[1])
        context.insert_before_op(self.apply_mask, inputs=[1], mask=mask)
        if self.gradients:
            context.insert_after_backward_op(self.apply_mask, grad_inputs=[1], mask=mask)
        self.masked.append(context.name)

    def apply_mask(self, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return value * mask


def weights_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the (module, attribute) of every weight of a linear layer or convolution by name."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)):
            found[f"{path}.weight"] = (module, "weight")
        elif isinstance(module, nn.MultiheadAttention):
            found[f"{path}.in_proj_weight"] = (module, "in_proj_weight")
    return found


def built(architecture: Architecture) -> nn.Module:
    torch.manual_seed(3)
    return architecture.build().train()


def masks_of(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    return {name: mask_of(parameters[name].detach()) for name in weights_of(model)}


def backward(model: nn.Module, architecture: Architecture) -> dict[str, Bits]:
    """Run forward and backward once and return everything except the parameters."""
    output = model(**architecture.feed())
    loss = loss_of(output)
    torch.autograd.backward(loss)
    state = state_of(model, output, loss)
    with amanda.disabled():
        return {name: bits_of(t) for name, t in state if not name.startswith("parameter ")}


@pytest.mark.parametrize("architecture", CASES, ids=str)
def test_pruned_model_is_a_twin_with_masked_weights(architecture: Architecture) -> None:
    model = built(architecture)
    reference = copy.deepcopy(model)
    masks = masks_of(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in masks:
                parameter.mul_(masks[name])

    tool = Prune()
    for seed in range(2):
        torch.manual_seed(seed)
        expected = backward(reference, architecture)
        torch.manual_seed(seed)
        with amanda.apply(tool):
            found = backward(model, architecture)
        assert differences(expected, found) == []
    assert len(tool.masked) == len(masks)

    # Straight through: the weights that were masked have gradients, too.
    parameters = dict(model.named_parameters())
    trained = [name for name in masks if parameters[name].requires_grad]
    dense = [name for name in trained if _any_at(parameters[name].grad, masks[name] == 0)]
    # Not all: the gradients of DETR's first decoder attention are 0, for one.
    assert len(dense) > len(trained) / 2


def _any_at(gradient: torch.Tensor | None, where: torch.Tensor) -> bool:
    return gradient is not None and bool((gradient[where] != 0).any())


@pytest.mark.parametrize("architecture", CASES, ids=str)
def test_gradient_mask_masks_the_weight_gradient_and_no_other(architecture: Architecture) -> None:
    model = built(architecture)
    reference = copy.deepcopy(model)
    masks = masks_of(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in masks:
                parameter.mul_(masks[name])

    tool = Prune(gradients=True)
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        with amanda.apply(tool):
            backward(model, architecture)
        torch.manual_seed(seed)
        reference.zero_grad()
        backward(reference, architecture)
        for (name, found), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if name in masks and expected.grad is not None:
                expected.grad.mul_(masks[name])
            assert bits_of(found.grad) == bits_of(expected.grad), name


@pytest.mark.parametrize("architecture", CASES, ids=str)
def test_training_is_that_of_a_twin_that_masks_by_hand(architecture: Architecture) -> None:
    """Several steps with momentum; pruned weights stay what they were."""
    model = built(architecture)
    reference = copy.deepcopy(model)
    masks = masks_of(model)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}

    def steps(network: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> Any:
        torch.manual_seed(11)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            optimizer.zero_grad()
            before()
            loss = loss_of(network(**architecture.feed()))
            torch.autograd.backward(loss)
            after()
            optimizer.step()
            yield bits_of(loss)

    @torch.no_grad()
    def mask_weights() -> None:
        for name, parameter in reference.named_parameters():
            if name in masks:
                parameter.mul_(masks[name])

    def mask_gradients() -> None:
        for name, parameter in reference.named_parameters():
            if name in masks and parameter.grad is not None:
                parameter.grad.mul_(masks[name])

    def nothing() -> None:
        pass

    expected = list(steps(reference, mask_weights, mask_gradients))
    with amanda.apply(Prune(gradients=True)):
        found = list(steps(model, nothing, nothing))
    assert found == expected
    assert len(set(found)) == STEPS  # The steps moved something.

    mask_weights()
    for (name, parameter), other in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        if name not in masks:
            assert bits_of(parameter) == bits_of(other), name
            continue
        pruned = masks[name] == 0
        # Where it is pruned, the sign of the reference's 0 depends on how often it was masked.
        assert bits_of(parameter[~pruned]) == bits_of(other[~pruned]), name
        assert torch.equal(parameter[pruned], first[name][pruned]), name


class Masked(nn.Module):
    """The parametrization `weight * mask`."""

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


class PruneDifferentiably(Prune):
    """Inserts a multiplication that is part of the differentiated program."""

    def analyse(self, context: OpContext) -> None:
        with amanda.autodiff_enabled():
            super().analyse(context)


@pytest.mark.parametrize("name", ["bert", "vit", "resnet", "unet", "efficientnet"])
def test_differentiated_mask_is_a_parametrized_weight(name: str) -> None:
    architecture = _CASES[name]
    model = built(architecture)
    reference = copy.deepcopy(model)
    masks = masks_of(model)
    for weight, (module, attribute) in weights_of(reference).items():
        parametrize.register_parametrization(module, attribute, Masked(masks[weight]))

    tool = PruneDifferentiably()
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        with amanda.apply(tool):
            loss = loss_of(model(**architecture.feed()))
            torch.autograd.backward(loss)
        torch.manual_seed(seed)
        reference.zero_grad()
        expected = loss_of(reference(**architecture.feed()))
        torch.autograd.backward(expected)
        assert bits_of(loss) == bits_of(expected)
        gradients = {
            name.replace("parametrizations.", "").replace(".original", ""): parameter.grad
            for name, parameter in reference.named_parameters()
        }
        for weight, parameter in model.named_parameters():
            assert bits_of(parameter.grad) == bits_of(gradients[weight]), weight
            if weight in masks:
                assert not _any_at(parameter.grad, masks[weight] == 0)


def test_differentiated_mask_of_a_function_call() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6), torch.randn(5, 6, requires_grad=True)
    mask = mask_of(weight.detach())
    (expected,) = torch.autograd.grad(nn.functional.linear(x, weight * mask).square().sum(), weight)
    with amanda.apply(PruneDifferentiably()):
        (found,) = torch.autograd.grad(nn.functional.linear(x, weight).square().sum(), weight)
    assert bits_of(found) == bits_of(expected)
    assert not _any_at(found, mask == 0)


# Activations.


def quantized(value: torch.Tensor) -> torch.Tensor:
    """Round to eighths; `value + (quantized - value)` is then exact, because they are close.

    By Sterbenz' lemma: the quotient of the two lies between a half and two, or it is 0. The last
    addition makes 0 of -0.
    """
    return torch.round(value * 8) / 8 + 0.0


def straight_through(value: torch.Tensor) -> torch.Tensor:
    """Quantize with the usual straight-through expression."""
    return value + (quantized(value) - value).detach()


#: Module class -> the one op that its forward consists of.
OPS_OF: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("linear",),
    nn.Conv2d: ("conv2d",),
    nn.LayerNorm: ("layer_norm",),
    nn.BatchNorm2d: ("batch_norm",),
    nn.ReLU: ("relu", "relu_"),
}


class Quantize(amanda.Tool):
    """Rounds the input or the output of the ops above."""

    def __init__(self, inputs: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.edited: list[str] = []
        self.types = [name for names in OPS_OF.values() for name in names]
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type in self.types:
            self.edited.append(context.name)
            if self.inputs:
                context.insert_before_op(quantized, inputs=[0])
            else:
                context.insert_after_op(quantized, outputs=[0])


# Only models whose ops of these types all lie in modules of these classes.
@pytest.mark.parametrize("inputs", [False, True], ids=["outputs", "inputs"])
@pytest.mark.parametrize("name", ["bert", "vit", "resnet", "unet"])
def test_edited_activations_are_straight_through(name: str, inputs: bool) -> None:
    architecture = _CASES[name]
    model = built(architecture)
    reference = copy.deepcopy(model)
    modules = [m for m in reference.modules() if type(m) in OPS_OF]
    for module in modules:
        if inputs:
            # Out of place: an in-place op on the edited copy leaves the input as it was, and
            # nothing but that op uses it here.
            module.register_forward_pre_hook(lambda _, args: (straight_through(args[0]),))
        else:
            module.register_forward_hook(lambda _, args, output: straight_through(output))

    tool = Quantize(inputs)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = backward(reference, architecture)
        torch.manual_seed(seed)
        with amanda.apply(tool):
            found = backward(model, architecture)
        assert differences(expected, found) == []
    assert len(tool.edited) == len(modules)
    torch.manual_seed(0)
    assert backward(built(architecture), architecture)["loss"] != expected["loss"]
