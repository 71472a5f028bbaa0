"""Self-test of an interceptor with the installed torch; run by `python -m`.

Observes, edits and restores a few operators and compares the results with plain torch. Exits with 0
if everything is right, else prints the reason to stderr. The environment variable selects the
interceptor. Run it in a separate process, since it may crash on an untested version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amanda_core.driver_kit import OpContext, Tool, attach

__all__ = ["main"]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


class _Watch(Tool):
    """Notes every operator, forward and backward, and observes each value."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: OpContext) -> None:
        self.forward.append(context.op_type)
        context.insert_before_op(_look)
        context.insert_after_op(_look)

    def analyse_backward(self, context: OpContext) -> None:
        self.backward.append(context.get_backward_op().__name__)
        context.insert_after_backward_op(_look)


class _Edit(Tool):
    """Doubles the second input of the only `mul`."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type == "mul":
            context.insert_before_op(_double, inputs=[1])


def _look(*values: Any) -> None:
    return None


def _double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


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


def _require(condition: object, what: str) -> None:
    if not condition:
        raise SystemExit(f"The self-test failed: {what}")


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def main() -> None:
    """Run the comparison, and exit with a message if a result differs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(5, 3)
    plain = _program(model, x)
    watch = _Watch()
    handle = attach(watch)
    try:
        watched = [_program(model, x) for _ in range(3)]
    finally:
        handle.remove()
    _require(all(_equal(plain, results) for results in watched), "watching changed a result")
    wanted = {"linear", "relu", "__getitem__", "T", "cat", "mul", "sum", "_Square", "add_"}
    missing = sorted(wanted - set(watch.forward))
    _require(not missing, f"operators were not seen: {', '.join(missing)}")
    _require(watch.forward.count("linear") == 2, "an operator was not seen once per site")
    missing = sorted({"ReluBackward0", "MulBackward0", "AccumulateGrad"} - set(watch.backward))
    _require(not missing, f"backward operators were not seen: {', '.join(missing)}")
    handle = attach(_Edit())
    try:
        edited = [_program(model, x) for _ in range(2)]
    finally:
        handle.remove()
    for results in edited:
        # Doubling a factor doubles the product and quadruples its square.
        _require(torch.equal(results[1], plain[1] * 2), "an edit did not take effect")
        _require(torch.allclose(results[2], plain[2] * 4), "an edit did not take effect")
    _require(_equal(plain, _program(model, x)), "not all was restored")
    from amanda_driver_torch.doctor import diagnose

    misplaced = diagnose().misplaced
    _require(not misplaced, f"not restored: {', '.join(misplaced)}")


if __name__ == "__main__":
    main()
