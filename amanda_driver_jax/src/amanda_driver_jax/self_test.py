"""Self-test of the driver with the installed JAX; run by `python -m`.

Observes, edits and restores a few operators, eager and jitted, and compares the results with plain
JAX. Exits with 0 if everything is right, else prints the reason to stderr.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amanda_core.driver_kit import Watching, applied, doubling, require, require_seen

__all__ = ["main"]


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


def _twice() -> list[list[Any]]:
    return [_program(), _program()]


def _near(some: list[Any], others: list[Any]) -> bool:
    return all(np.allclose(one, other, rtol=1e-5) for one, other in zip(some, others, strict=True))


def main() -> None:
    """Run the comparison, and exit with a message if a result differs."""
    plain, watch = _program(), Watching()
    watched = applied(watch, _twice)
    require(all(_near(plain, results) for results in watched), "watching changed a result")
    require_seen({"matmul", "relu", "tanh", "exp", "square", "add"}, watch.forward)
    require(watch.forward.count("sin") == 5, "an operator was not seen once per site")
    require_seen({"matmul_vjp", "tanh_vjp"}, watch.backward, "backward operators")
    require(watch.values > 0, "no value was observed")
    for results in applied(doubling("sin", [0]), _twice):
        require(not _near(results[:1], plain[:1]), "an edit did not take effect")
        require(_near(results[:2], results[2:4]), "eager and jitted edits differ")
        doubled = np.sin(2 * np.linspace(0.1, 1, 8, dtype="f").reshape(4, 2))
        require(_near(results[4:], [doubled] * 3), "an edit did not take effect")
    again = _program()
    require(all(map(np.array_equal, plain, again)), "not all was restored")


if __name__ == "__main__":
    main()
