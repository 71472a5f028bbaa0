"""Private names and releases of MXNet stand in one package of the driver only."""

from __future__ import annotations

import functools
from pathlib import Path

import mxnet
from mxnet import gluon

from amanda_core.testing.checks.private_names import DriverSources, has_underscore
from amanda_driver_mxnet import mxnet_internals
from amanda_driver_mxnet.mxnet_internals.arrays import ENTRY_POINTS

OWNER = "mxnet_internals/"
#: Names of MXNet's operators begin with underscores, but are those that graphs show.
OPERATORS = "vocabulary.py"


@functools.cache
def sources() -> DriverSources:
    things = (
        *(mxnet, mxnet.nd.NDArray, mxnet.autograd, mxnet.symbol.Symbol, mxnet.nd.register),
        *(gluon.Block(), gluon.HybridBlock(), gluon.Trainer, gluon.Parameter("w")),
    )
    theirs = frozenset(name for thing in things for name in dir(thing) if has_underscore(name))
    package = Path(__file__).parents[1] / "src/amanda_driver_mxnet"
    return DriverSources(package, "mxnet", has_underscore, theirs)


def test_private_names_stand_in_their_owner_only() -> None:
    others = [name for name in sources().texts if name != OPERATORS and not name.startswith(OWNER)]
    assert [line for name in others for line in sources().mentions(name)] == []
    assert all(sources().mentions(f"{OWNER}{name}.py") for name in ("arrays", "graphs"))


def test_releases_stand_in_their_owner_only() -> None:
    numbers = r"\b1\.\d\b"
    others = [name for name in sources().texts if not name.startswith(OWNER)]
    assert [line for name in others for line in sources().releases(name, numbers)] == []
    planted = "\nNEW = mxnet.__version__ > '1.8'\n"
    assert len(sources().releases("facts.py", numbers, sources().texts["facts.py"] + planted)) == 2


def test_one_that_is_planted_is_found() -> None:
    planted = "\nfrom mxnet.base import _LIB\ndef f(a): return a._children, a._reg_params\n"
    name = "execution/eager.py"
    assert len(sources().mentions(name, sources().texts[name] + planted)) == 3


def test_they_were_checked_with_the_installed_version() -> None:
    assert mxnet.__version__ == mxnet_internals.CHECKED
    for owner, attribute in ENTRY_POINTS.values():
        assert callable(getattr(owner, attribute))
