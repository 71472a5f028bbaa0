"""The conformance kit itself: each core test catches a driver that is wrong; oracle; summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amanda_core.testing import (
    CAPABILITIES,
    MODELS,
    Backend,
    Edits,
    Rig,
    conformance,
    core_tests,
    differentiate,
    evaluate,
    needs,
    source_of,
)
from amanda_core.testing.capabilities import needs_of
from amanda_core.testing.conformance import suite_tests
from amanda_core.testing.models import CORE_WORDS
from amanda_core.testing.oracle import mapped, same

from . import toy
from .broken_drivers import BROKEN, Sabotaged
from .conformance_backend import ToyBackend
from .toy_driver import REPLACED

pytest_plugins = ["pytester"]


# Broken drivers.


@pytest.fixture(autouse=True)
def _toy_as_it_was() -> Iterator[None]:
    names = (*REPLACED, "parameter")
    found = {name: getattr(toy, name) for name in names}
    yield
    for name in names:
        setattr(toy, name, found[name])


def result_of(name: str, driver: Sabotaged) -> BaseException | None:
    """What a test of the suite says of a driver: its failure, or None."""
    backend = ToyBackend(driver)
    with backend.registered():
        try:
            suite_tests()[name](Rig(backend, backend.info()))
        except (Exception, pytest.fail.Exception) as error:
            return error
    return None


def test_there_is_a_broken_driver_for_each_core_test() -> None:
    assert set(BROKEN) == set(core_tests())
    assert len(set(BROKEN.values())) == len(BROKEN)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_driver_is_caught(name: str) -> None:
    # The scaffold of the broken drivers is right by itself.
    assert result_of(name, Sabotaged()) is None
    assert result_of(name, BROKEN[name]()) is not None
