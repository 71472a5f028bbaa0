"""The parameters that operators read are looked up by identity, at a cost that does not grow."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import amanda
from amanda_core import OpContext
from amanda_driver_jax.identity import plain_trees


def loss(params: dict[str, dict[str, Any]], x: Any) -> Any:
    for layer in params.values():
        x = x @ layer["w"] + layer["b"]
    return x.sum()


def made(size: int) -> dict[str, dict[str, Any]]:
    return {f"layer{n}": {"w": jnp.eye(2), "b": jnp.zeros(2)} for n in range(size)}


class Reads(amanda.Tool):
    """Keeps the names of the weights that operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        self.names += [weight.name for weight in context.weights.values()]


def calls_of(run: Callable[[], object]) -> int:
    """Return how often functions of Python are called."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("library", ["", "flax.nnx"])
@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_what_a_first_trace_costs_for_each_parameter_does_not_grow(
    transform: Any, library: str
) -> None:
    if library:  # With it, a tree may have variables.
        importlib.import_module(library)

    def cost(size: int) -> float:
        params, x, tool = made(size), jnp.ones((1, 2)), Reads()
        with amanda.apply(tool):
            count = calls_of(lambda: transform(lambda *args: loss(*args))(params, x))
        assert len({*tool.names}) == 2 * size
        return count / size

    cost(5)  # Imports and caches.
    assert cost(60) < 1.1 * cost(20)


def test_a_parameter_that_is_replaced_inside_a_function_is_no_longer_the_former_one() -> None:
    tool = Reads()

    def run(params: dict[str, Any], x: Any) -> Any:
        x = x @ params["a"]
        params["a"], params["b"] = params["b"], params["a"]
        return (x @ params["a"] @ params["b"]).sum()

    params = {"a": jnp.eye(2), "b": 2 * jnp.eye(2)}
    with amanda.apply(tool):
        jax.jit(run)(params, jnp.ones((1, 2)))
    assert [name.rpartition(":")[2] for name in tool.names] == ["a", "a", "b"]


@jax.tree_util.register_pytree_node_class
class Incomparable:
    """A tree whose description is an array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """Return the array."""
        return (self.array,), np.arange(3)

    @classmethod
    def tree_unflatten(cls, _: Any, children: tuple[Any]) -> Incomparable:
        """Return a tree."""
        return cls(*children)


def test_a_tree_is_known_until_it_changes_or_dies() -> None:
    array = jnp.ones(2)
    tree: dict[str, Any] = {"a": {"w": jnp.ones((2, 2))}, "b": array, "c": Incomparable(array)}
    for _ in range(2):
        assert list(plain_trees._arrays(tree)) == ["a.w", "b", "c.0"]
    tree["b"] = jnp.zeros(2)
    assert plain_trees._arrays(tree)["b"] is tree["b"]
    tree["n"] = jnp.arange(2)
    found = plain_trees._arrays(tree)
    assert list(found) == ["a.w", "b", "c.0"]
    assert not found.all_real
    key = id(tree)
    assert key in plain_trees._KNOWN
    del tree, found
    gc.collect()
    assert key not in plain_trees._KNOWN
