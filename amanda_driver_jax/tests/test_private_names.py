"""Private names and releases of JAX stand in one module of the driver only."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.core.primitives import jit_p

import amanda
from amanda_core.testing.checks.private_names import DriverSources, has_underscore
from amanda_driver_jax import jax_internals as internals

OWNER = "jax_internals.py"


def _is_private(name: str) -> bool:
    return has_underscore(name) or "._src" in name


@functools.cache
def sources() -> DriverSources:
    things = (
        *(jnp.ones(1), jax.jit(jnp.sin), Primitive, internals.INFER[0], jit_p),
        *(internals.current_trace(), jax, jax.core),
    )
    found = {name for thing in things for name in dir(thing) if has_underscore(name)}
    package = Path(__file__).parents[1] / "src/amanda_driver_jax"
    return DriverSources(package, "jax", _is_private, frozenset(found))


def test_private_names_stand_in_their_owner_only() -> None:
    others = [name for name in sources().texts if name != OWNER]
    found = [line for name in others for line in sources().mentions(name)]
    # The suffix of the driver's own backward operators is also that of something in JAX.
    assert [line for line in found if not line.endswith(": _vjp")] == []


def test_releases_stand_in_their_owner_only() -> None:
    numbers = r"\b0\.\d\d\b"
    others = [name for name in sources().texts if name != OWNER]
    assert [line for name in others for line in sources().releases(name, numbers)] == []
    assert sources().releases(OWNER, numbers)
    planted = "\nNEW = jax.__version__ > '0.10'\n"
    assert len(sources().releases("facts.py", numbers, sources().texts["facts.py"] + planted)) == 2


def test_the_owner_is_searched_as_all_else() -> None:
    assert sources().mentions(OWNER)


def test_one_that_is_planted_is_found() -> None:
    planted = "\nfrom jax._src import core\ndef f(array): return array._value\n"
    assert len(sources().mentions("routines.py", sources().texts["routines.py"] + planted)) == 2


def test_what_is_replaced_is_restored() -> None:
    before = (
        Primitive.bind,
        *(getattr(owner, name) for owner, name in (internals.INFER, internals.RUN)),
    )
    with amanda.apply(amanda.Tool()):
        assert Primitive.bind is not before[0]
    after = (
        Primitive.bind,
        *(getattr(owner, name) for owner, name in (internals.INFER, internals.RUN)),
    )
    assert after == before
