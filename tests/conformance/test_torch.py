"""Conformance suite over PyTorch, with each available interceptor of the driver."""

from __future__ import annotations

import pytest

from amanda_core import OpContext, Step, discovery, hookimpl
from amanda_core.testing import Rig, conformance
from amanda_core.testing.conformance import suite_tests

from .torch_backend import FunctionModeBackend, NativeBackend, unavailable

pytestmark = pytest.mark.one_interceptor

# It starts a process that imports torch.
MARKS = {"test_a_framework_that_is_imported_under_tools_is_instrumented": pytest.mark.slow}

TestFunctionMode = conformance(FunctionModeBackend, MARKS)

WHY_NOT_NATIVE = unavailable(NativeBackend)
if not WHY_NOT_NATIVE:
    TestNative = conformance(NativeBackend, MARKS)


class Mistaken:
    """A plugin that puts a wrong type into the contexts of one operator."""

    def __init__(self, op: str, key: str, value: object) -> None:
        self.op, self.key, self.value = op, key, value

    @hookimpl(trylast=True)
    def amanda_prepare_context(self, context: OpContext) -> None:
        if context.is_forward() and context["type"] == self.op:
            context[self.key] = self.value


@pytest.mark.parametrize(
    ("op", "key", "value", "test"),
    [
        ("conv2d", "weight_layout", "IOHW", "test_the_roles_and_layouts_of_a_convolution"),
        ("conv2d", "layout", "NHWC", "test_the_roles_and_layouts_of_a_convolution"),
        ("conv2d", "input_roles", ("weight",), "test_the_roles_and_layouts_of_a_convolution"),
        ("matmul", "input_roles", ("right", "left"), "test_the_roles_of_a_matrix_product"),
        ("matmul", "weight_layout", "OI", "test_the_roles_of_a_matrix_product"),
    ],
)
def test_the_kit_finds_a_wrong_word(op: str, key: str, value: object, test: str) -> None:
    backend = FunctionModeBackend()
    with backend.registered():
        rig = Rig(backend, backend.info())
        suite_tests()[test](rig)
        discovery.register_plugin(Mistaken(op, key, value), "mistaken")
        try:
            with pytest.raises((AssertionError, IndexError)):
                suite_tests()[test](rig)
        finally:
            discovery.unregister_plugin("mistaken")


@pytest.mark.parametrize(
    "test",
    [
        "test_a_routine_that_returns_another_shape",
        "test_a_routine_that_returns_another_type_of_numbers",
    ],
)
def test_the_kit_finds_a_driver_that_ignores_results(
    test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FunctionModeBackend()
    monkeypatch.setattr(Step, "__call__", lambda self, values: [])
    with backend.registered(), pytest.raises(AssertionError):
        suite_tests()[test](Rig(backend, backend.info()))


@pytest.mark.skipif(bool(WHY_NOT_NATIVE), reason=WHY_NOT_NATIVE)
def test_the_native_interceptor_is_there() -> None:
    assert NativeBackend().interceptor == "native"
