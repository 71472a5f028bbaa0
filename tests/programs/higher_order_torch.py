"""Programs of second and mixed order in PyTorch; each returns its results."""

# mypy: allow-untyped-calls
# torch leaves much untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian, jvp, vhp, vjp
from torch.utils.checkpoint import checkpoint

__all__ = ["PROGRAMS"]


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(_numbers(seed, *parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.second(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def _input() -> torch.Tensor:
    return _numbers(9, 4, 6).requires_grad_()


def gradient_of_a_gradient() -> Any:
    x, network = _input(), _Network()
    (gradient,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
    return [gradient, *torch.autograd.grad(gradient.sum(), [x, *network.parameters()])]


def gradient_penalty() -> Any:
    """Train the critic of WGAN-GP for three steps."""
    critic = _Network()
    optimizer = torch.optim.Adam(critic.parameters(), 0.01)
    losses = []
    for step in range(3):
        real, fake = _numbers(10 + step, 4, 6), _numbers(20 + step, 4, 6)
        between = ((real + fake) / 2).requires_grad_()
        scores = critic(between)
        (gradient,) = torch.autograd.grad(
            scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [*losses, *critic.parameters()]


def third_order() -> Any:
    x = _input()
    y = (torch.exp(x) * x**3).sum()
    found = []
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(y)
    return found


def functional_jacobian() -> Any:
    network = _Network()
    return [
        jacobian(network, _input()),
        jacobian(network, _input(), create_graph=True, strict=True),
        jacobian(network, _input(), vectorize=True),
        jacobian(network, _input(), vectorize=True, strategy="forward-mode"),
    ]


def functional_hessian() -> Any:
    network = _Network()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return network(x).square().sum()  # type: ignore[no-any-return]

    return [hessian(loss, _input()), hessian(loss, _input(), vectorize=True)]


def functional_products() -> Any:
    network, x = _Network(), _input()
    return [
        vjp(network, x, torch.ones(4, 3), create_graph=True),
        jvp(network, x, torch.ones(4, 6)),
        vhp(lambda x: network(x).square().sum(), x, torch.ones(4, 6)),
    ]


def transformed_jacobians() -> Any:
    network, x = _Network(), _input().detach()
    return [
        torch.func.jacrev(network)(x),
        torch.func.jacfwd(network)(x),
        torch.func.hessian(lambda x: network(x).square().sum())(x),
    ]


def transformed_products() -> Any:
    network, x = _Network(), _input().detach()
    output, pull = torch.func.vjp(network, x)  # type: ignore[misc]
    return [
        output,
        pull(torch.ones_like(output)),
        torch.func.jvp(network, (x,), (torch.ones_like(x),)),
    ]


def gradients_of_each_sample() -> Any:
    network = _Network()
    weights = dict(network.named_parameters())

    def loss(weights: Any, row: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(network, weights, (row[None],))
        return output.square().sum()  # type: ignore[no-any-return]

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, _input().detach())
    return list(found.values())


def forward_over_reverse() -> Any:
    network, x = _Network(), _input().detach()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return network(x).square().sum()  # type: ignore[no-any-return]

    return torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),))


def reverse_over_forward() -> Any:
    network, x = _Network(), _input().detach()

    def tangent(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(network, (x,), (torch.ones_like(x),))[1].sum()  # type: ignore[no-any-return]

    return torch.func.grad(tangent)(x)


def dual_numbers() -> Any:
    network, x = _Network(), _input().detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return list(forward_ad.unpack_dual(network(dual)))


def dual_numbers_and_a_gradient() -> Any:
    network, x = _Network(), _input()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(network(dual)).tangent
        assert tangent is not None
        weights = [x, network.first.weight, network.second.weight]
        return [tangent, *torch.autograd.grad(tangent.sum(), weights)]


def batched_gradients() -> Any:
    x, network = _input(), _Network()
    output = network(x)
    basis = torch.eye(12).reshape(12, 4, 3)
    return torch.autograd.grad(output, x, basis, is_grads_batched=True)


def style_transfer() -> Any:
    """Differentiate several values with respect to one tensor."""
    image = _numbers(5, 1, 1, 6, 6).requires_grad_()
    features = F.relu(F.conv2d(image, _numbers(6, 4, 1, 3, 3), padding=1)).flatten(2)
    gram = features @ features.transpose(1, 2)
    loss = ((gram - 1) ** 2).mean() + (features + features).mean()
    loss.backward()
    assert image.grad is not None
    return [image.grad, (image - 0.1 * image.grad).clamp(0, 1)]


def checkpoint_with_a_penalty() -> Any:
    x, network = _input(), _Network()
    output = checkpoint(network, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [gradient, x.grad, *(parameter.grad for parameter in network.parameters())]


class _Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.sigmoid(x) * x  # type: ignore[no-any-return]


def second_order_of_a_custom_function() -> Any:
    x = _input()
    y = (_Bent.apply(x) ** 2).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return [gradient, *torch.autograd.grad(gradient.sum(), x)]


def hooks_of_second_order() -> Any:
    """Register users' hooks at tensors and nodes of a gradient that is differentiated."""
    x, network, seen = _input(), _Network(), list[torch.Tensor]()
    output = network(x)
    output.register_hook(lambda gradient: seen.append(gradient.detach()))
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    gradient.register_hook(lambda second: second * 2)
    gradient.square().sum().backward()
    return [*seen, x.grad]


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__.replace("_", " "): program
    for program in (
        gradient_of_a_gradient,
        gradient_penalty,
        third_order,
        functional_jacobian,
        functional_hessian,
        functional_products,
        transformed_jacobians,
        transformed_products,
        gradients_of_each_sample,
        forward_over_reverse,
        reverse_over_forward,
        dual_numbers,
        dual_numbers_and_a_gradient,
        batched_gradients,
        style_transfer,
        checkpoint_with_a_penalty,
        second_order_of_a_custom_function,
        hooks_of_second_order,
    )
}
