"""`OpContext.facts`: what the driver answers about tensors."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda_core import DescribingAttachment, OpContext
from amanda_core.errors import ActionError, UnsupportedError
from amanda_core.interface.facts import DENSE, Facts, NotReadableError, Placement
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver


def asked(driver: ToyDriver) -> tuple[Facts | None, OpContext]:
    found: list[OpContext] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(found.append)
    with amanda.apply(tool):
        toy.relu(toy.Value(2.0))
        assert isinstance(next(iter(driver.interception.attached.values())), DescribingAttachment)
        inside = found[0].facts
    return inside, found[0]


def test_a_context_has_the_answers_of_its_driver(driver: ToyDriver) -> None:
    inside, context = asked(driver)
    assert inside is driver.facts
    # Results are made after `apply`, too.
    assert context.facts is inside


def test_a_driver_may_answer_nothing(driver: ToyDriver) -> None:
    driver.facts = None
    assert asked(driver)[0] is None


class TwoProcesses(type(ToyDriver().facts)):  # type: ignore[misc]
    """Each value is half of the whole one."""

    def placement(self, tensor: toy.Value) -> Placement:
        return Placement((), None, "sum", (0, 1))

    def whole(self, tensor: toy.Value) -> toy.Value:
        return toy.Value(tensor.data * 2)


def test_a_logical_routine_gets_values_as_a_whole(driver: ToyDriver) -> None:
    driver.facts = TwoProcesses()
    seen: list[Any] = []

    def look(*values: Any, what: str) -> None:
        seen.append((what, *((v.data if isinstance(v, toy.Value) else v) for v in values)))

    def analyse(context: OpContext) -> None:
        context.insert_before_op(look, observe=True, what="part")
        context.insert_before_op(look, observe=True, logical=True, what="whole")
        context.insert_after_op(look, observe=True, logical=True, what="output")

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool, amanda.look("relu", lambda v: seen.append(v.data), logical=True)):
        assert toy.relu(toy.Value(3.0)).data == 3.0
    assert seen == [("part", 3.0), ("whole", 6.0), ("output", 6.0), 6.0]


@pytest.mark.parametrize(("observe", "mark"), [(False, None), (True, amanda.staged)])
def test_a_routine_that_is_no_observer_on_the_host_gets_parts(
    driver: ToyDriver, observe: bool, mark: Any
) -> None:
    def look(value: Any) -> None:
        """Do nothing."""

    routine = mark(look) if mark else look
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_op(routine, observe=observe, logical=True)
    )
    with (
        amanda.apply(tool),
        pytest.raises(ActionError, match=r"logical=True takes a routine on the host.*facts\.whole"),
    ):
        toy.relu(toy.Value(3.0))


def test_a_driver_that_knows_of_parts_and_does_not_gather_them_says_so(driver: ToyDriver) -> None:
    driver.facts = TwoProcesses()
    with pytest.raises(UnsupportedError, match="does not gather values of many processes"):
        Facts.whole(driver.facts, toy.Value(3.0))


class Fewest(Facts):
    """The fewest answers that a driver has to write."""

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, float)

    def dtype(self, tensor: float) -> str:
        return "float64"

    def shape(self, tensor: float) -> tuple[int, ...]:
        return ()


def test_what_a_driver_leaves_out() -> None:
    facts = Fewest()
    assert (facts.device(1.0), facts.layout(1.0)) == ("cpu", DENSE)
    assert (facts.stored(1.0), facts.nbytes(1.0), facts.version(1.0)) == (None, None, None)
    assert facts.base(1.0) == 1.0
    assert not facts.is_parameter(1.0)
    assert facts.is_own(1.0)
    assert facts.constant("cpu") is None
    with pytest.raises(NotReadableError, match="does not report where tensors lie"):
        facts.storage(1.0)
    with pytest.raises(NotReadableError, match="does not read values"):
        facts.values(1.0)
