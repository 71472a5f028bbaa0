"""Self-test of the driver with the installed MindSpore; run by `python -m`.

Observes, edits and restores a few operators, in PyNative and in graph mode. Compares the results
with plain MindSpore, and what tools see with MindSpore's own dispatcher. Exits with 0 if everything
is right, else prints the reason to stderr.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from amanda_core.driver_kit import OpContext, Watching, applied, doubling, require, require_seen
from amanda_driver_mindspore.interception import ROUTES
from amanda_driver_mindspore.mindspore_internals.dispatch import HAS_MODES
from amanda_driver_mindspore.oracle import VARIABLE, Oracle

__all__ = ["main"]


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


def _near(some: list[Any], others: list[Any]) -> bool:
    return all(np.allclose(one, other, rtol=1e-5) for one, other in zip(some, others, strict=True))


def _in_both_modes(net: nn.Cell) -> list[list[Any]]:
    oracle: Oracle = next(iter(ROUTES.attached.values())).oracle
    found = [_program(net, mode) for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE)]
    require(not oracle.outside, f"tools did not see {', '.join(oracle.outside)}")
    require(oracle.inside or not HAS_MODES, "MindSpore's dispatcher showed no operator")
    return found


def _common_type(context: OpContext) -> Any:
    return context["backward_type" if context.is_backward() else "type"]


def main() -> None:
    """Run a small network with and without tools, in both modes, and compare the results.

    A tool that watches must see all operators, and must not change the value and the gradients by
    more than 1e-5, relatively. A tool that doubles an operator's result must change the value
    accordingly, and no gradient. Without tools the results must be exactly the first ones again.

    Raises:
        SystemExit: A comparison fails; its message says which.
    """
    if HAS_MODES:
        os.environ[VARIABLE] = "1"
    net = _Net()
    plain, watch, both = _program(net), Watching(_common_type), partial(_in_both_modes, net)
    watched = applied(watch, both)
    require(all(_near(plain, results) for results in watched), "watching changed a result")
    require_seen({"matmul", "tanh", "concat", "add", "slice", "sum"}, watch.forward)
    require_seen({"matmul_backward", "tanh_backward"}, watch.backward, "backward operators")
    require(watch.values > 0, "no value was observed")
    for results in applied(doubling("Tanh"), both):
        # The additions of 1, of which there are 5 * 3, are not edited.
        require(np.allclose(results[0] - 15, 2 * (plain[0] - 15)), "an edit did not take effect")
        require(_near(results[1:], plain[1:]), "an edit did not pass its gradient straight through")
    require(all(map(np.array_equal, plain, _program(net))), "not all was restored")


if __name__ == "__main__":
    main()
