"""Private names and releases of MindSpore stand in one package of the driver only."""

from __future__ import annotations

import functools
from pathlib import Path

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore.graph import api

from amanda_core.testing.checks.private_names import DriverSources, has_underscore
from amanda_driver_mindspore import mindspore_internals
from amanda_driver_mindspore.mindspore_internals.doors import BOUNDARIES, doors

OWNER = "mindspore_internals/"


@functools.cache
def sources() -> DriverSources:
    things = (mindspore, Tensor, Parameter, nn.Cell(), nn.Optimizer, api, api._PyNativeExecutor)
    theirs = frozenset(name for thing in things for name in dir(thing) if has_underscore(name))
    package = Path(__file__).parents[1] / "src/amanda_driver_mindspore"
    return DriverSources(package, "mindspore", has_underscore, theirs)


def test_private_names_stand_in_their_owner_only() -> None:
    others = [name for name in sources().texts if not name.startswith(OWNER)]
    assert [line for name in others for line in sources().mentions(name)] == []
    assert all(
        sources().mentions(f"{OWNER}{name}.py") for name in ("doors", "tape", "cells", "programs")
    )


def test_releases_stand_in_their_owner_only() -> None:
    numbers = r"\b2\.\d+\b"
    others = [name for name in sources().texts if not name.startswith(OWNER)]
    assert [line for name in others for line in sources().releases(name, numbers)] == []
    planted = "\nNEW = mindspore.__version__ > '2.9'\n"
    assert len(sources().releases("facts.py", numbers, sources().texts["facts.py"] + planted)) == 2


def test_one_that_is_planted_is_found() -> None:
    planted = "\nfrom mindspore._c_expression import TensorPy\ndef f(a): return a._cells\n"
    name = "execution/eager.py"
    assert len(sources().mentions(name, sources().texts[name] + planted)) == 2


def test_they_were_checked_with_the_installed_version() -> None:
    assert mindspore.__version__ == mindspore_internals.CHECKED
    for owner, attribute in BOUNDARIES.values():
        assert callable(getattr(owner, attribute))
    forms = [door.form for door in doors()]
    assert {form: forms.count(form) > 40 for form in set(forms) - {"run_op"}} == dict.fromkeys(
        ("pyboost", "primitive", "functional", "method"), True
    )
