"""Self-test of an interceptor with the installed torch; run by `python -m`.

Observes, edits and restores a few operators and compares the results with plain torch. Exits with 0
if everything is right, else prints the reason to stderr. The environment variable selects the
interceptor. Run it in a separate process, since it may crash on an untested version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amanda_core.driver_kit import OpContext, Watching, applied, doubling, require, require_seen

__all__ = ["main"]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


def _program(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Run operators of each kind that interceptors treat differently, and return all results."""
    model.zero_grad()
    hidden = model(x)
    first = hidden[0]
    halves = torch.cat([hidden.T[:2], hidden.T[2:]])
    scaled = halves * first.sum()
    loss = _Square.apply(scaled).sum()  # type: ignore[no-untyped-call]
    loss.backward()
    with torch.no_grad():
        written = x.clone()
        written += 1
        written[0] = 0
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [hidden.detach(), scaled.detach(), loss.detach(), written, *grads]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _name(context: OpContext) -> str:
    return context.get_backward_op().__name__ if context.is_backward() else context.op_type


def main() -> None:
    """Run the comparison, and exit with a message if a result differs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(5, 3)
    plain = _program(model, x)
    watch = Watching(_name, observe=False)
    watched = applied(watch, lambda: [_program(model, x) for _ in range(3)])
    require(all(_equal(plain, results) for results in watched), "watching changed a result")
    wanted = {"linear", "relu", "__getitem__", "T", "cat", "mul", "sum", "_Square", "add_"}
    require_seen(wanted, watch.forward)
    require(watch.forward.count("linear") == 2, "an operator was not seen once per site")
    wanted = {"ReluBackward0", "MulBackward0", "AccumulateGrad"}
    require_seen(wanted, watch.backward, "backward operators")
    edited = applied(doubling("mul", [1]), lambda: [_program(model, x) for _ in range(2)])
    for results in edited:
        # Doubling a factor doubles the product and quadruples its square.
        require(torch.equal(results[1], plain[1] * 2), "an edit did not take effect")
        require(torch.allclose(results[2], plain[2] * 4), "an edit did not take effect")
    require(_equal(plain, _program(model, x)), "not all was restored")
    from amanda_driver_torch.doctor import diagnose

    misplaced = diagnose().misplaced
    require(not misplaced, f"not restored: {', '.join(misplaced)}")


if __name__ == "__main__":
    main()
