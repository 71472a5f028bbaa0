"""What is written, read or exported under tools is what it is without them."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import export as early_export  # As programs import it: before tools are applied.

import amanda

WEIGHTS = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.arange(2.0)}
X = jnp.ones((1, 3))


@jax.jit  # type: ignore[untyped-decorator]
def model(x: Any) -> Any:
    return jnp.tanh(x @ WEIGHTS["w"]) + WEIGHTS["b"]


def arrays(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def in_flax(read: bool) -> Any:
    files = pytest.importorskip("flax.serialization")
    if not read:
        return files.to_bytes(WEIGHTS)
    with amanda.disabled():
        data = files.to_bytes(WEIGHTS)
    return arrays(files.from_bytes(WEIGHTS, data))


def in_orbax() -> Any:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = checkpoint.StandardCheckpointer()
        checkpointer.save(f"{folder}/it", WEIGHTS)
        checkpointer.wait_until_finished()
        return arrays(checkpointer.restore(f"{folder}/it"))


#: What a program may write -> whether it warns if a tool edits.
PROGRAMS: dict[str, tuple[Callable[[], Any], bool]] = {
    "export": (lambda: jax.export.export(model)(X).mlir_module_serialized, True),
    "imported export": (lambda: early_export(model)(X).mlir_module_serialized, True),
    "flax": (lambda: in_flax(read=False), True),
    "flax reads": (lambda: in_flax(read=True), False),
    "orbax": (in_orbax, True),
    "deepcopy": (lambda: arrays(copy.deepcopy(WEIGHTS)), False),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(np.array_equal(one, other))


class AddsOne(amanda.Tool):
    def __init__(self) -> None:
        self.count = 0
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        def add(*values: Any) -> Any:
            return [v + 1.0 if jnp.issubdtype(v.dtype, jnp.floating) else v for v in values]

        self.count += 1
        context.insert_after_op(add)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_written_is_that_without_tools(name: str) -> None:
    program, warns = PROGRAMS[name]
    tool, results, seen = AddsOne(), [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # An export holds the lines that called it, and those of what JAX has kept of it.
        for applied in (contextlib.nullcontext(), amanda.apply(tool)):
            jax.clear_caches()
            with applied:
                results.append(program())
                seen.append(tool.count)
                model(X)
    assert same(*results)
    assert seen == [0, 0]
    assert tool.count > 0
    said = [str(w.message) for w in caught if issubclass(w.category, amanda.AmandaWarning)]
    assert len(said) == warns, said
    assert all("without the changes of AddsOne" in one for one in said)
