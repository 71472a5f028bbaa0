"""MindSpore as the conformance kit uses it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, _c_expression, nn, ops
from mindspore.graph import api
from mindspore.ops.auto_generate import gen_ops_prim

from amanda_core.testing import Backend, Gradients, Model, Program, Value
from amanda_core.testing.kit.backend import Transformed

__all__ = ["GraphMode", "Jitted", "PyNative"]


class _Recomputed(nn.Cell):  # type: ignore[misc]
    """A cell with the parameters of a program, which its backward program computes again."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.function, self.weights = program.function, ParameterTuple(program.parameters)
        self.count = len(program.model.inputs)
        self.recompute()

    def construct(self, *inputs: Any) -> Any:
        return self.function(*inputs, *self.weights)


def recomputed(program: Program) -> Program:
    """Return a program that its backward program computes again."""
    cell = _Recomputed(program)
    return replace(program, function=lambda *values: cell(*values[: cell.count]))


class PyNative(Backend):
    """Programs in PyNative mode."""

    driver = "mindspore"
    mode = "eager"
    functions: Mapping[str, Callable[..., Any]] = {
        "add": ops.add,
        "mul": ops.mul,
        "relu": ops.relu,
        "matmul": ops.matmul,
        "exp": ops.exp,
        "tanh": ops.tanh,
        "sum": ops.sum,
        "conv2d": ops.conv2d,
    }

    def from_python(self, value: Value, like: Any = None) -> Any:
        return Tensor(np.array(value, np.float32))

    def to_python(self, value: Any) -> Value:
        found: Value = value.asnumpy().tolist()
        return found

    def parameter(self, value: Value) -> Any:
        return Parameter(self.from_python(value), name=f"p{id(value)}")

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        class Scoped(nn.Cell):  # type: ignore[misc]
            def construct(self, *values: Any) -> Any:
                return function(*values)

        cell = Scoped()
        for inner_name, module in inner.items():
            cell.insert_child_to_cell(inner_name, module)
        return cell

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        values, arriving = ([self.from_python(one) for one in many] for many in (inputs, seeds))
        outputs: list[Any] = []

        def function(*leaves: Any) -> Any:
            outputs[:] = program.function(*leaves, *program.parameters)
            return tuple(outputs) if len(outputs) > 1 else outputs[0]

        sens = tuple(arriving) if len(arriving) > 1 else arriving[0]
        weights = list(program.parameters)
        if weights:
            run = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
            of_inputs, of_weights = run(function, weights)(*values, sens)
        else:
            run = ops.GradOperation(get_all=True, sens_param=True)
            of_inputs, of_weights = run(function)(*values, sens), ()
        names = [*program.model.inputs, *program.model.parameters]
        found = map(self.to_python, [*of_inputs, *of_weights])
        return Gradients(
            [self.to_python(output) for output in outputs], dict(zip(names, found, strict=True))
        )

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        return recomputed(self.build(model, values))

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        return {"recomputed": Transformed(recomputed(program), calls=2, backward=True)}

    def mixed(self) -> Callable[[], Sequence[Value]] | None:
        numbers = np.arange(20, dtype=np.float32).reshape(5, 4) / 7
        table = Parameter(Tensor(numbers), name="table")

        def program() -> list[Value]:
            ms.set_seed(3)
            x = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1].copy())
            places: list[Any] = []

            def function(x: Any) -> Any:
                rows = ops.gather(table, Tensor([1, 4], ms.int32), 0)
                left, right = ops.split(rows, 2, 1)
                best, where = ops.topk(x, 2)
                places.append(where)
                dropped = ops.dropout(left * right, 0.5)
                return dropped.sum() + best.sum() + x[0].reshape(3, 1).sum()

            loss, (of_x, (of_table,)) = ms.value_and_grad(function, 0, weights=[table])(x)
            return [self.to_python(value) for value in (loss, of_table, of_x, places[-1])]

        return program

    def of_another_type(self, value: Any) -> Any:
        return value.astype(ms.float64)

    def end_step(self, program: Program) -> None:
        parameter = Parameter(Tensor(np.ones(2, np.float32)), name="w")
        nn.SGD([parameter], 0.1)((parameter * 2,))

    def found(self) -> Mapping[str, object]:
        kinds: tuple[Any, ...] = (_c_expression.TensorPy, nn.Cell, nn.Optimizer, api._JitExecutor)
        kinds += (api._PyNativeExecutor, _c_expression.AddPrim_, _c_expression.MulFunctional_)
        held = {
            f"{one.__name__}.{name}": value
            for one in kinds
            for name, value in vars(one).items()
            if not isinstance(value, int)  # Classes count their objects.
        }
        return {**super().found(), **held, **vars(gen_ops_prim)}


def importable(program: Program) -> Program:
    """Let MindSpore's compiler import the module of a program, of which it reads the names."""
    module = types.ModuleType(program.function.__module__)
    vars(module).update(program.function.__globals__)
    sys.modules[module.__name__] = module
    return program


class Jitted(PyNative):
    """Functions of `mindspore.jit`, called and differentiated by PyNative programs."""

    @property
    def title(self) -> str:
        return "mindspore jit"

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = importable(super().build(model, values))
        return replace(program, function=ms.jit(program.function))


class _Whole(nn.Cell):  # type: ignore[misc]
    """A program with its parameters as a cell, which graph mode compiles."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.function, self.weights = program.function, ParameterTuple(program.parameters)

    def construct(self, *inputs: Any) -> Any:
        return self.function(*inputs, *self.weights)


class GraphMode(PyNative):
    """Cells that are made and called in graph mode."""

    _WHY = "graph mode compiles the function that the kit differentiates; `Jitted` has gradients"
    without = dict.fromkeys(
        (
            *("gradients", "aligned_gradients", "late_gradients", "replace_backward"),
            *("autodiff", "recomputed_edits", "recomputed_flag"),
        ),
        _WHY,
    )

    @property
    def title(self) -> str:
        return "mindspore graph mode"

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = importable(super().build(model, values))
        is_cell = all(node.scope for node in model.nodes)
        whole = program.function if is_cell else _Whole(program)

        def run(*arguments: Any) -> Any:
            ms.set_context(mode=ms.GRAPH_MODE)
            try:
                return whole(*arguments if is_cell else arguments[: len(model.inputs)])
            finally:
                ms.set_context(mode=ms.PYNATIVE_MODE)

        return replace(program, function=run)

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        return {}

    def mixed(self) -> Callable[[], Sequence[Value]] | None:
        return None
