"""Self-test of the driver with the installed MindSpore; run by `python -m`.

Observes, edits and restores a few operators, in PyNative and in graph mode. Compares the results
with plain MindSpore, and what tools see with MindSpore's own dispatcher. Exits with 0 if everything
is right, else prints the reason to stderr.
"""

from __future__ import annotations

import os
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from amanda_core.driver_kit import OpContext, Tool, attach
from amanda_driver_mindspore.interception import ROUTES
from amanda_driver_mindspore.mindspore_internals.dispatch import HAS_MODES
from amanda_driver_mindspore.oracle import VARIABLE, Oracle

__all__ = ["main"]


class _Watch(Tool):
    """Notes every operator, forward and backward, and observes each value."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.values = 0
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: OpContext) -> None:
        self.forward.append(str(context["type"]))
        context.insert_after_op(self.look, observe=True)

    def analyse_backward(self, context: OpContext) -> None:
        self.backward.append(str(context["backward_type"]))
        context.insert_after_backward_op(self.look, observe=True)

    def look(self, *values: Any) -> None:
        self.values += 1


class _Edit(Tool):
    """Doubles what each `tanh` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context["type"] == "tanh":
            context.insert_after_op(_double)


def _double(value: Any) -> Any:
    return value * 2


class _Net(nn.Cell):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(2, 3, weight_init="ones")

    def construct(self, x: Any) -> Any:
        hidden = ops.tanh(self.layer(x))
        return (ops.concat((hidden, hidden[:1]), 0) + ms.mint.add(hidden[0], 1.0)).sum()


def _program(net: nn.Cell, mode: int = ms.PYNATIVE_MODE) -> list[Any]:
    x = ms.Tensor(np.linspace(0.1, 1, 8, dtype="f").reshape(4, 2))
    before = ms.get_context("mode")
    ms.set_context(mode=mode)
    try:
        value, (of_x, of_weights) = ms.value_and_grad(net, 0, net.trainable_params())(x)
        return [one.asnumpy() for one in (value, of_x, *of_weights)]
    finally:
        ms.set_context(mode=before)


def _require(condition: object, what: str) -> None:
    if not condition:
        raise SystemExit(f"The self-test failed: {what}")


def _near(some: list[Any], others: list[Any]) -> bool:
    return all(np.allclose(one, other, rtol=1e-5) for one, other in zip(some, others, strict=True))


def _applied(tool: Tool, net: nn.Cell) -> list[list[Any]]:
    handle = attach(tool)
    oracle: Oracle = next(iter(ROUTES.attached.values())).oracle
    try:
        found = [_program(net, mode) for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE)]
        _require(not oracle.outside, f"tools did not see {', '.join(oracle.outside)}")
        _require(oracle.inside or not HAS_MODES, "MindSpore's dispatcher showed no operator")
        return found
    finally:
        handle.remove()


def main() -> None:
    """Run the comparison, and exit with a message if a result differs."""
    if HAS_MODES:
        os.environ[VARIABLE] = "1"
    net = _Net()
    plain, watch = _program(net), _Watch()
    watched = _applied(watch, net)
    _require(all(_near(plain, results) for results in watched), "watching changed a result")
    missing = sorted({"matmul", "tanh", "concat", "add", "slice", "sum"} - set(watch.forward))
    _require(not missing, f"operators were not seen: {', '.join(missing)}")
    missing = sorted({"matmul_backward", "tanh_backward"} - set(watch.backward))
    _require(not missing, f"backward operators were not seen: {', '.join(missing)}")
    _require(watch.values > 0, "no value was observed")
    for results in _applied(_Edit(), net):
        # The additions of 1, of which there are 5 * 3, are not edited.
        _require(np.allclose(results[0] - 15, 2 * (plain[0] - 15)), "an edit did not take effect")
        _require(
            _near(results[1:], plain[1:]), "an edit did not pass its gradient straight through"
        )
    _require(all(map(np.array_equal, plain, _program(net))), "not all was restored")


if __name__ == "__main__":
    main()
