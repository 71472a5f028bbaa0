"""JAX as the conformance kit uses it, eager and jitted."""

# mypy: allow-untyped-decorators, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from amanda_core.testing import Backend, Gradients, Model, Program, Transformed, Value


def scoped(
    name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a module of Flax, or a function in a named scope if Flax is not installed."""
    try:
        from flax import nnx
    except ImportError:
        return jax.named_scope(name)(function)

    class Scoped(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            for key, module in inner.items():
                setattr(self, key, module)

        def __call__(self, *values: Any) -> Any:
            return function(*values)

    return Scoped()


class Eager(Backend):
    """Operators are executed one by one."""

    driver = "jax"
    mode = "eager"
    functions: Mapping[str, Callable[..., Any]] = {
        "add": jnp.add,
        "mul": jnp.multiply,
        "relu": jax.nn.relu,
        "matmul": jnp.matmul,
        "exp": jnp.exp,
        "tanh": jnp.tanh,
        "sum": jnp.sum,
    }

    def from_python(self, value: Value, like: Any = None) -> Any:
        return jnp.asarray(value, jnp.float32)

    def to_python(self, value: Any) -> Value:
        found: Value = np.asarray(value).tolist()
        return found

    def found(self) -> Mapping[str, object]:
        return {**super().found(), "bind": Primitive.bind}

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        return scoped(name, function, inner)

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        leaves = [*map(self.from_python, inputs), *program.parameters]
        given = tuple(map(self.from_python, seeds))
        outputs, found = self.pulled(program, leaves, given)
        names = [*program.model.inputs, *program.model.parameters]
        return Gradients(
            [self.to_python(output) for output in outputs],
            {name: self.to_python(g) for name, g in zip(names, found, strict=True)},
        )

    def pulled(self, program: Program, leaves: Sequence[Any], seeds: Any) -> Any:
        outputs, pull = jax.vjp(program.function, *leaves)
        return outputs, pull(seeds)

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = self.build(model, values)
        return self.changed(program, jax.checkpoint(program.function))

    def changed(self, program: Program, function: Callable[..., Any]) -> Program:
        """Return the program with another function."""
        return Program(program.model, function, program.parameters)

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        function = program.function

        def branch(x: Any, *parameters: Any) -> Any:
            return lax.cond(x.sum() < 1e9, function, lambda *v: function(*v), x, *parameters)

        def loop(x: Any, *parameters: Any) -> Any:
            def body(carry: Any, _: Any) -> Any:
                return carry, function(carry, *parameters)

            return tuple(each[-1] for each in lax.scan(body, x, None, length=3)[1])

        def mapped(x: Any, *parameters: Any) -> Any:
            found = jax.vmap(function, (0, *[None] * len(parameters)))(
                jnp.stack([x, x]), *parameters
            )
            return tuple(each[1] for each in found)

        return {
            "branch": Transformed(self.changed(program, branch)),
            "loop": Transformed(self.changed(program, loop), calls=3),
            "map": Transformed(self.changed(program, mapped), calls=2),
            "recomputed": Transformed(
                self.changed(program, jax.checkpoint(function)), calls=2, backward=True
            ),
        }

    def mixed(self) -> Callable[[], Sequence[Value]]:
        def loss(x: Any, key: Any) -> Any:
            key, other = jax.random.split(key)
            noise = jax.random.normal(key, (4,))
            values, indices = lax.top_k(x * noise, 2)
            picked = jnp.take(x, indices) * jnp.arange(2)
            return jnp.sum(values) + jnp.sum(picked) + jax.random.uniform(other)

        compute = self.compiled(jax.value_and_grad(loss))

        def program() -> list[Value]:
            found, gradient = compute(jnp.arange(4.0), jax.random.key(3))
            return [self.to_python(found), self.to_python(gradient)]

        return program

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def of_another_type(self, value: Any) -> Any:
        return jnp.asarray(value, jnp.float16)

    def end_step(self, program: Program) -> None:
        jax.jit(lambda x: x + 1)(1.0)


class Jit(Eager):
    """Functions are traced and compiled."""

    mode = "jit"

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        return self.changed(super().build(model, values), super().build(model, values).function)

    def changed(self, program: Program, function: Callable[..., Any]) -> Program:
        traces: list[int] = []

        def counted(*leaves: Any) -> Any:
            traces.append(1)
            return function(*leaves)

        @jax.jit
        def compute(leaves: Any, seeds: Any) -> Any:
            outputs, pull = jax.vjp(counted, *leaves)
            return outputs, pull(seeds)

        return Program(program.model, jax.jit(counted), program.parameters, (compute, traces))

    def pulled(self, program: Program, leaves: Sequence[Any], seeds: Any) -> Any:
        return program.extra[0](leaves, seeds)

    def traces(self, program: Program) -> int | None:
        return len(program.extra[1])

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function)

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        return scoped(name, function, inner)
