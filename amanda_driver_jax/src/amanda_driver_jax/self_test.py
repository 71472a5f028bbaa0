"""Self-test of the driver with the installed JAX; run by `python -m`.

Observes, edits and restores a few operators, eager and jitted, and compares the results with plain
JAX. Exits with 0 if everything is right, else prints the reason to stderr.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amanda_core.driver_kit import OpContext, Tool, attach

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
        self.forward.append(context.op_type)
        context.insert_after_op(self.look, observe=True)

    def analyse_backward(self, context: OpContext) -> None:
        self.backward.append(context.op_type)
        context.insert_after_backward_op(self.look, observe=True)

    def look(self, *values: Any) -> None:
        self.values += 1


class _Edit(Tool):
    """Doubles the input of each `sin`."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type == "sin":
            context.insert_before_op(_double, inputs=[0])


def _double(value: Any) -> Any:
    return value * 2


def _loss(w: Any, x: Any) -> Any:
    """Run operators of each kind that the driver treats differently."""
    hidden = jax.nn.relu(x @ w)

    def body(carry: Any, row: Any) -> tuple[Any, Any]:
        return carry + jax.lax.tanh(row), jnp.exp(carry)

    total, rows = jax.lax.scan(body, jnp.zeros(3), hidden)
    found = jax.vmap(jnp.sin)(rows).sum() + jax.checkpoint(jnp.square)(total).sum()
    return jax.lax.cond(found > 0, lambda v: v * 2, jnp.negative, found)


_EAGER = jax.value_and_grad(_loss)
_JITTED = jax.jit(_EAGER)


def _program() -> list[Any]:
    x, w = jnp.linspace(0.1, 1, 8).reshape(4, 2), jnp.linspace(-1, 1, 6).reshape(2, 3)
    found = [_EAGER(w, x), _JITTED(w, x), jnp.sin(x), jax.jit(jnp.sin)(x), jax.lax.sin(x)]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def _require(condition: object, what: str) -> None:
    if not condition:
        raise SystemExit(f"The self-test failed: {what}")


def _near(some: list[Any], others: list[Any]) -> bool:
    return all(np.allclose(one, other, rtol=1e-5) for one, other in zip(some, others, strict=True))


def _applied(tool: Tool, times: int) -> list[list[Any]]:
    handle = attach(tool)
    try:
        return [_program() for _ in range(times)]
    finally:
        handle.remove()


def main() -> None:
    """Run the comparison, and exit with a message if a result differs."""
    plain, watch = _program(), _Watch()
    watched = _applied(watch, 2)
    _require(all(_near(plain, results) for results in watched), "watching changed a result")
    missing = sorted({"matmul", "relu", "tanh", "exp", "square", "add"} - set(watch.forward))
    _require(not missing, f"operators were not seen: {', '.join(missing)}")
    _require(watch.forward.count("sin") == 5, "an operator was not seen once per site")
    missing = sorted({"matmul_vjp", "tanh_vjp"} - set(watch.backward))
    _require(not missing, f"backward operators were not seen: {', '.join(missing)}")
    _require(watch.values > 0, "no value was observed")
    for results in _applied(_Edit(), 2):
        _require(not _near(results[:1], plain[:1]), "an edit did not take effect")
        _require(_near(results[:2], results[2:4]), "eager and jitted edits differ")
        doubled = np.sin(2 * np.linspace(0.1, 1, 8, dtype="f").reshape(4, 2))
        _require(_near(results[4:], [doubled] * 3), "an edit did not take effect")
    again = _program()
    _require(all(map(np.array_equal, plain, again)), "not all was restored")


if __name__ == "__main__":
    main()
