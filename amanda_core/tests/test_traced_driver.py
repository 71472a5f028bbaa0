"""A driver of a compiling framework, written with public names: conformance, and its own tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amanda
from amanda_core.driver_kit.execution import OpRecord
from amanda_core.plugins import discovery
from amanda_core.testing import conformance
from amanda_core.testing.checks.public_names import private_uses
from amanda_core.testing.kit.conformance import suite_tests
from amanda_core.testing.kit.rig import Rig
from amanda_core.testing.toy import driver as toy_driver, framework as toy

from . import traced_driver, traced_functions as compiler
from .making import tool
from .traced_backend import TracedBackend
from .traced_driver import TracedAttachment, TracedDriver

TestTraced = conformance(TracedBackend)


@pytest.fixture
def _traced() -> Iterator[None]:
    discovery.register(TracedDriver(), "toy")
    found = (toy.dispatch, compiler.run)
    yield
    assert (toy.dispatch, compiler.run) == found
    assert compiler.set_cache_key(None) is None


def relu_of_product(x: Any, y: Any) -> Any:
    return [toy.relu(toy.mul(x, y))]


def run(program: compiler.Compiled, x: float = 3.0, y: float = 4.0) -> float:
    (result,) = program(toy.Value(x), toy.Value(y))
    number: float = result.data
    return number


def doubling(op: str = "mul") -> amanda.Tool:
    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == op:
            context.insert_after_op(lambda y: toy.Value(y.data * 2))

    return tool(analyse)


class OfTheUser(BaseException):
    """An exception type that no framework knows."""


def failing(times: int) -> tuple[list[int], amanda.Tool]:
    left = [times]

    def routine(*values: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OfTheUser("in a callback")

    return left, tool(lambda context: context.insert_before_op(routine))


@pytest.mark.parametrize("driver", [toy_driver, traced_driver])
def test_the_driver_uses_public_names_alone(tmp_path: Path, driver: ModuleType) -> None:
    (tmp_path / "driver.py").write_text(Path(str(driver.__file__)).read_text())
    # The framework, the driver of its other mode, and what registers it for a test, are the kit's.
    kits = ("amanda_core.testing", "amanda_core.plugins.discovery")
    uses = [use for use in private_uses(tmp_path) if not any(name in use for name in kits)]
    assert uses == []


@pytest.mark.usefixtures("_traced")
def test_a_warm_function_is_traced_once_for_each_state_of_the_tools() -> None:
    program = compiler.Compiled(relu_of_product)
    assert run(program) == 12.0
    first, second = doubling(), doubling("relu")
    for _ in range(3):
        with amanda.apply(first):
            assert run(program) == 24.0
            with amanda.disabled():
                assert run(program) == 12.0
            with amanda.apply(second):
                assert run(program) == 48.0
            assert run(program) == 24.0
        assert run(program) == 12.0
    # Plain, one tool, two tools: applied again they find their programs.
    assert program.traces == 3


@pytest.mark.usefixtures("_traced")
def test_an_invalidated_tool_is_in_a_new_trace() -> None:
    program = compiler.Compiled(relu_of_product)
    doubled = doubling()
    with amanda.apply(doubled):
        assert run(program) == 24.0
        doubled.invalidate()
        assert run(program) == 24.0
    assert program.traces == 2


@pytest.mark.usefixtures("_traced")
def test_what_a_callback_raises_comes_out_of_the_call() -> None:
    program = compiler.Compiled(relu_of_product)
    compiler.lost.clear()
    _, tools = failing(1)
    with amanda.apply(tools):
        with pytest.raises(OfTheUser, match="in a callback") as caught:
            run(program)
        assert run(program) == 12.0
    assert "routine failing.<locals>.routine" in "".join(caught.value.__notes__)
    assert run(program) == 12.0
    # The framework saw none of it.
    assert compiler.lost == []


@pytest.mark.usefixtures("_traced")
def test_a_program_of_an_earlier_apply_raises_in_the_later_one() -> None:
    program = compiler.Compiled(relu_of_product)
    left, tools = failing(0)
    with amanda.apply(tools):
        assert run(program) == 12.0
    left[0] = 2
    with amanda.apply(tools):
        with pytest.raises(OfTheUser) as caught:
            run(program)
        assert run(program) == 12.0
    assert program.traces == 1
    # Both operators ran a routine.
    assert "OfTheUser" in "".join(caught.value.__notes__)


@pytest.mark.usefixtures("_traced")
def test_a_compiled_function_in_a_routine_is_the_plain_one() -> None:
    program, inner = compiler.Compiled(relu_of_product), compiler.Compiled(relu_of_product)
    seen: list[float] = []

    def routine(*values: toy.Value) -> None:
        seen.append(inner(*values)[0].data)

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "mul":
            context.insert_before_op(routine)

    with amanda.apply(doubling(), tool(analyse)):
        assert run(inner) == 24.0
        seen.clear()
        assert run(program) == 24.0
    assert seen == [12.0]


# The optional parts of the kit find what is wrong with a driver that compiles.


class KeyedLate(TracedAttachment):
    """Polls for changes at operators, which a warm program never executes."""

    def changed(self) -> None:
        pass

    def dispatch(self, op: toy.Op, arguments: list[Any]) -> tuple[Any, ...]:
        compiler.set_cache_key(self.key())
        return super().dispatch(op, arguments)


class ForgetfulOfSwitches(TracedAttachment):
    """Has no key for disabled tools."""

    def key(self) -> object:
        return self.session.epoch


class Everlasting(TracedAttachment):
    """Stores the tools' programs under the key of the plain program."""

    def changed(self) -> None:
        pass


class Wasteful(TracedAttachment):
    """Traces at each run."""

    def end_of_run(self) -> None:
        super().end_of_run()
        compiler.set_cache_key((self.key(), object()))


class OnlyOneOutput(TracedAttachment):
    """Assumes that each operator has one output."""

    def execute(self, record: OpRecord, op: toy.Op, arguments: list[Any]) -> tuple[Any, ...]:
        return super().execute(record, op, arguments)[:1]


WARM = "test_a_program_is_edited_only_while_tools_are_active"
AFTERWARDS = "test_a_compiled_program_is_the_plain_one_afterwards"
ALL_POINTS = "test_a_tool_at_all_points_of_all_ops_changes_nothing"


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (KeyedLate, WARM, {"transformation": "branch", "warm": True}),
        (Everlasting, WARM, {"transformation": "", "warm": False}),
        (Everlasting, WARM, {"transformation": "loop", "warm": True}),
        (ForgetfulOfSwitches, WARM, {"transformation": "map", "warm": True}),
        (Wasteful, AFTERWARDS, {"transformation": ""}),
        (Wasteful, AFTERWARDS, {"transformation": "loop"}),
        (OnlyOneOutput, ALL_POINTS, {"how": "observers"}),
    ],
)
def test_a_wrong_driver_is_caught(
    wrong: type[TracedAttachment], test: str, arguments: dict[str, Any]
) -> None:
    class Wrong(TracedDriver):
        attachment_type = wrong

    for plugin, is_right in ((TracedDriver(), True), (Wrong(), False)):
        backend = TracedBackend(plugin)
        with backend.registered():
            try:
                suite_tests()[test](Rig(backend, backend.info()), **arguments)
            except Exception:
                assert not is_right
                compiler.set_cache_key(None)
            else:
                assert is_right
