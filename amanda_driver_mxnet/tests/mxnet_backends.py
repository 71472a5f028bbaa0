"""MXNet as the conformance kit uses it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.base import _LIB
from mxnet.ndarray import register

from amanda_core.testing import Backend, Gradients, Model, Program, Value, function_of

__all__ = ["Eager", "Hybrid", "Numpy", "StaticHybrid"]


class Eager(Backend):
    """Imperative programs on `mx.nd`."""

    driver = "mxnet"
    mode = "eager"
    functions: Mapping[str, Callable[..., Any]] = {
        "add": mx.nd.add,
        "mul": mx.nd.multiply,
        "relu": mx.nd.relu,
        "matmul": mx.nd.dot,
        "exp": mx.nd.exp,
        "tanh": mx.nd.tanh,
        "sum": mx.nd.sum,
        "conv2d": functools.partial(mx.nd.Convolution, kernel=(2, 2), num_filter=3, no_bias=True),
    }

    def from_python(self, value: Value, like: Any = None) -> Any:
        return mx.nd.array(value)

    def to_python(self, value: Any) -> Value:
        found: Value = value.asnumpy().tolist()
        # MXNet has no arrays without axes, except in NumPy's interface.
        return found[0] if value.shape == (1,) and isinstance(found, list) else found

    def parameter(self, value: Value) -> Any:
        array = self.from_python(value)
        array.attach_grad()
        return array

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        class Scoped(gluon.Block):  # type: ignore[misc]
            def forward(self, *values: Any) -> Any:
                return function(*values)

        block = Scoped()
        for inner_name, module in inner.items():
            block.register_child(module, inner_name)
        return block

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        leaves = [self.from_python(value) for value in inputs]
        for leaf in (*leaves, *program.parameters):
            leaf.attach_grad()
        leaves += program.parameters
        with autograd.record():
            outputs = program.function(*leaves)
        heads = [
            self.from_python(seed).reshape(output.shape)
            for seed, output in zip(seeds, outputs, strict=True)
        ]
        autograd.backward(list(outputs), heads)
        names = [*program.model.inputs, *program.model.parameters]
        return Gradients(
            [self.to_python(output) for output in outputs],
            {name: self.to_python(leaf.grad) for name, leaf in zip(names, leaves, strict=True)},
        )

    def mixed(self) -> Callable[[], Sequence[Value]] | None:
        def program() -> list[Value]:
            mx.random.seed(3)
            table = mx.nd.random.normal(shape=(5, 4))
            x = mx.nd.random.uniform(shape=(2, 3))
            for leaf in (table, x):
                leaf.attach_grad()
            with autograd.record():
                rows = mx.nd.Embedding(
                    mx.nd.array([1, 4], dtype="int32"), table, input_dim=5, output_dim=4
                )
                left, right = mx.nd.split(rows, 2, axis=1)
                best = mx.nd.topk(x, k=2, ret_typ="both")
                dropped = mx.nd.Dropout(left * right, p=0.5)
                loss = mx.nd.sum(dropped) + mx.nd.sum(best[0]) + x[0].reshape((3, 1)).sum()
            loss.backward()
            return [self.to_python(v) for v in (loss, table.grad, x.grad, best[1])]

        return program

    def of_another_type(self, value: Any) -> Any:
        return value.astype("float64")

    def end_step(self, program: Program) -> None:
        parameter = gluon.Parameter("w", shape=(1,))
        parameter.initialize()
        with autograd.record():
            loss = parameter.data() * 2
        loss.backward()
        gluon.Trainer({"w": parameter}, "sgd").step(1)

    def found(self) -> Mapping[str, object]:
        return {
            **super().found(),
            "invoke": register._imperative_invoke,
            "backward": _LIB.MXAutogradBackwardEx,
            **{f"NDArray.{name}": value for name, value in vars(mx.nd.NDArray).items()},
            **{f"Block.{name}": value for name, value in vars(gluon.Block).items()},
            **{f"HybridBlock.{name}": value for name, value in vars(gluon.HybridBlock).items()},
            **{f"Trainer.{name}": value for name, value in vars(gluon.Trainer).items()},
        }


class Numpy(Eager):
    """Imperative programs on `mx.np` and `mx.npx`."""

    functions: Mapping[str, Callable[..., Any]] = {
        "add": mx.np.add,
        "mul": mx.np.multiply,
        "relu": mx.npx.relu,
        "matmul": mx.np.matmul,
        "exp": mx.np.exp,
        "tanh": mx.np.tanh,
        "sum": mx.np.sum,
    }

    @property
    def title(self) -> str:
        return "mxnet eager np"

    def from_python(self, value: Value, like: Any = None) -> Any:
        return mx.np.array(value, dtype="float32")

    def to_python(self, value: Any) -> Value:
        found: Value = value.asnumpy().tolist()
        return found

    def mixed(self) -> None:
        return None


class Hybrid(Eager):
    """Hybridized blocks, whose programs MXNet runs in C."""

    mode = "hybrid"
    static: ClassVar[bool] = False
    functions: Mapping[str, Callable[..., Any]] = {
        "add": mx.sym.broadcast_add,
        "mul": mx.sym.broadcast_mul,
        "relu": mx.sym.relu,
        "matmul": mx.sym.dot,
        "exp": mx.sym.exp,
        "tanh": mx.sym.tanh,
        "sum": mx.sym.sum,
        "conv2d": functools.partial(mx.sym.Convolution, kernel=(2, 2), num_filter=3, no_bias=True),
    }

    @property
    def title(self) -> str:
        return f"mxnet hybrid{' static' * self.static}"

    def call(self, common_type: str, *values: Any) -> Any:
        return Eager.functions[common_type](*values)

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        blocks: dict[str, gluon.HybridBlock] = {}

        def scoped(
            name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
        ) -> Callable[..., Any]:
            class Scoped(gluon.HybridBlock):  # type: ignore[misc]
                def hybrid_forward(self, F: Any, *values: Any) -> Any:
                    return function(*values)

            block = blocks[name] = Scoped()
            for inner_name in inner:
                block.register_child(blocks.pop(inner_name), inner_name)
            return block

        function = function_of(model, self.functions, scoped)

        class Network(gluon.HybridBlock):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                with self.name_scope():
                    for name in model.parameters:
                        array = mx.nd.array(values[name])
                        constant = mx.init.Constant(0)
                        parameter = self.params.get(name, shape=array.shape, init=constant)
                        setattr(self, name, parameter)

            def hybrid_forward(self, F: Any, *inputs: Any, **parameters: Any) -> Any:
                return function(*inputs, *(parameters[name] for name in model.parameters))

        block = Network()
        for name, scope in blocks.items():
            block.register_child(scope, name)
        block.initialize()
        for name in model.parameters:
            getattr(block, name).set_data(mx.nd.array(values[name]))
        block.hybridize(static_alloc=self.static, static_shape=self.static)
        count = len(model.inputs)

        def run(*arguments: Any) -> Any:
            return block(*arguments[:count])

        arrays = [getattr(block, name).data() for name in model.parameters]
        return Program(model, run, arrays, block)

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        leaves = [self.from_python(value) for value in inputs]
        for leaf in leaves:
            leaf.attach_grad()
        with autograd.record():
            outputs = program.function(*leaves)
        autograd.backward(list(outputs), [self.from_python(seed) for seed in seeds])
        names = [*program.model.inputs, *program.model.parameters]
        leaves += program.parameters
        return Gradients(
            [self.to_python(output) for output in outputs],
            {name: self.to_python(leaf.grad) for name, leaf in zip(names, leaves, strict=True)},
        )

    def mixed(self) -> Callable[[], Sequence[Value]] | None:
        class Mixed(gluon.HybridBlock):  # type: ignore[misc]
            def hybrid_forward(self, F: Any, table: Any, x: Any, numbers: Any) -> Any:
                rows = F.Embedding(numbers, table, input_dim=5, output_dim=4)
                left, right = F.split(rows, 2, axis=1)
                values, places = F.topk(x, k=2, ret_typ="both")
                return F.sum(left * right) + F.sum(values), places

        block = Mixed()
        block.hybridize(static_alloc=self.static, static_shape=self.static)

        def program() -> list[Value]:
            mx.random.seed(3)
            table = mx.nd.random.normal(shape=(5, 4))
            x = mx.nd.random.uniform(shape=(2, 3))
            for leaf in (table, x):
                leaf.attach_grad()
            with autograd.record():
                loss, places = block(table, x, mx.nd.array([1, 4], dtype="int32"))
            loss.backward()
            return [self.to_python(value) for value in (loss, table.grad, x.grad, places)]

        return program


class StaticHybrid(Hybrid):
    """Hybridized blocks with memory that is allocated once."""

    static = True
