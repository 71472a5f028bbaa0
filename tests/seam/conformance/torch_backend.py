"""PyTorch as a backend of the conformance kit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing import Backend, Gradients, Model, Program, Transformed, Value

__all__ = ["FunctionModeBackend", "NativeBackend", "unavailable"]

#: Where the tensors of the kit are: `maintenance.device` runs it with those of a GPU.
DEVICE = os.environ.get("AMANDA_TEST_DEVICE", "cpu")


class _Scope(nn.Module):
    """A module whose forward is a given function, with modules inside it."""

    def __init__(
        self, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.function = function
        for name, module in inner.items():
            assert isinstance(module, nn.Module)
            self.add_module(name, module)

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


class TorchBackend(Backend):
    """Eager PyTorch with one of the driver's interceptors."""

    driver = "pytorch"
    mode = "eager"
    interceptor: ClassVar[str]
    functions: Mapping[str, Callable[..., Any]] = {
        "add": torch.add,
        "mul": torch.mul,
        "relu": torch.relu,
        "matmul": torch.matmul,
        "tanh": torch.tanh,
        "exp": torch.exp,
        "sum": torch.sum,
        "conv2d": torch.conv2d,
    }

    def from_python(self, value: Value, like: Any = None) -> torch.Tensor:
        return torch.tensor(value, device=DEVICE)

    def to_python(self, value: Any) -> Value:
        numbers: Value = value.detach().tolist()
        return numbers

    def parameter(self, value: Value) -> torch.Tensor:
        return torch.tensor(value, requires_grad=True, device=DEVICE)

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        leaves = [*map(self.parameter, inputs), *program.parameters]
        outputs = program.function(*leaves)
        found = torch.autograd.grad(outputs, leaves, [self.from_python(seed) for seed in seeds])
        names = [*program.model.inputs, *program.model.parameters]
        return Gradients(
            [self.to_python(output) for output in outputs],
            {name: self.to_python(g) for name, g in zip(names, found, strict=True)},
        )

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        return _Scope(function, inner)

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = self.build(model, values)
        function = program.function
        program.function = lambda *given: checkpoint(function, *given, use_reentrant=False)
        return program

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        function, parameters = program.function, program.parameters

        def recomputed(*given: Any) -> Any:
            return checkpoint(function, *given, use_reentrant=False)

        return {
            "recomputed": Transformed(
                Program(program.model, recomputed, parameters), calls=2, backward=True
            ),
        }

    def mixed(self) -> Callable[[], Sequence[Value]]:
        table = torch.arange(12.0).reshape(4, 3)

        def program() -> list[Value]:
            generator = torch.Generator().manual_seed(3)
            torch.manual_seed(3)
            x = torch.rand(3, 4, generator=generator).requires_grad_()
            values, places = torch.topk(nn.functional.dropout(x), 2)
            rows = nn.functional.embedding(places // 2 + torch.randint(2, places.shape), table)
            left, right = torch.split(x, 2, dim=1)
            loss = (values.unsqueeze(-1) * rows).sum() + (left * right).mean()
            (gradient,) = torch.autograd.grad(loss, x)
            found: list[Value] = [loss.item(), gradient.tolist(), places.tolist()]
            return found

        return program

    def of_another_type(self, value: Any) -> Any:
        return value.double()

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__, "interceptor": self.interceptor}

    @contextmanager
    def registered(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, super().registered():
            patch.setenv("AMANDA_TORCH_INTERCEPTOR", self.interceptor)
            yield

    def end_step(self, program: Program) -> None:
        torch.optim.SGD(program.parameters, lr=0.0).step()


class FunctionModeBackend(TorchBackend):
    """Eager PyTorch with the interceptor in Python."""

    interceptor = "function_mode"
    without = {"threads": "it reaches a thread at its first call of a module"}  # noqa: RUF012


class NativeBackend(TorchBackend):
    """Eager PyTorch with the interceptor in C++."""

    interceptor = "native"

    @property
    def title(self) -> str:
        return "pytorch eager, native"


def unavailable(backend: type[TorchBackend]) -> str:
    """Return why the interceptor of a backend is not installed, or an empty string."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMANDA_TORCH_INTERCEPTOR", backend.interceptor)
        try:
            with amanda.apply(amanda.Tool()):
                return ""
        except UnsupportedError as error:
            return str(error).splitlines()[0]
