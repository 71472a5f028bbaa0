"""`OpContext.facts`: what the driver answers about tensors."""

from __future__ import annotations

import pytest

import amanda
from amanda_core import DescribingAttachment, OpContext
from amanda_core.interface.facts import DENSE, Facts, NotReadableError
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
