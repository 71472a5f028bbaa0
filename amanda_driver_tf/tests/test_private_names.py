"""Private names and releases of TensorFlow stand in one package of the driver only."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

import functools
from pathlib import Path

import tensorflow as tf

from amanda_core.testing.checks.private_names import DriverSources, has_underscore
from amanda_driver_tf.tensorflow_internals import entry_points, modules, names, objects, tapes

OWNER = "tensorflow_internals/"


@functools.cache  # Not at import, which would start the runtime before other tests configure it.
def theirs() -> frozenset[str]:
    """Return the names with an underscore that objects of TensorFlow have."""
    with tf.Graph().as_default() as graph:
        tensor = tf.constant(0)
    things = (
        *(graph, tensor, tensor.op, tf.constant(0), tf.Variable(0), modules.session.BaseSession),
        *(tf.function(lambda: 0).get_concrete_function(), modules.context.context()),
        *(getattr(modules, name) for name in modules.__all__),
    )
    found = {name for thing in things for name in dir(thing) if has_underscore(name)}
    # A graph does not list the first. The second is that of the driver's bodies of graphs.
    return frozenset(found | {"_lock"}) - {"_source"}


def is_private(name: str) -> bool:
    return has_underscore(name) or name.startswith("tensorflow.python")


@functools.cache
def sources() -> DriverSources:
    package = Path(__file__).parents[1] / "src/amanda_driver_tf"
    return DriverSources(package, "tensorflow", is_private, theirs())


def test_private_names_stand_in_their_owner_only() -> None:
    others = [name for name in sources().texts if not name.startswith(OWNER)]
    assert [line for name in others for line in sources().mentions(name)] == []


#: TensorFlow's releases.
RELEASES = r"\b2\.\d\d\b"


def test_releases_stand_in_their_owner_only() -> None:
    others = [name for name in sources().texts if not name.startswith(OWNER)]
    assert [line for name in others for line in sources().releases(name, RELEASES)] == []
    name = "rewriting/body_rewriting.py"
    planted = "\nif tf.__version__ > '2.18': pass  # Not before 2.19.\n"
    assert len(sources().releases(name, RELEASES, sources().texts[name] + planted)) == 3


def test_no_function_of_the_c_bindings_is_named_elsewhere() -> None:
    found = [
        f"{name}:{number}"
        for name, text in sources().texts.items()
        if name.endswith(".py") and not name.startswith(OWNER)
        for number, line in enumerate(text.splitlines(), 1)
        if "TFE_Py_" in line.replace("`TFE_Py_", "")
    ]
    assert found == []


def test_the_owner_is_searched_as_all_else() -> None:
    for name in ("modules", "entry_points", "objects", "names"):
        assert sources().mentions(f"{OWNER}{name}.py")


def test_one_that_is_planted_is_found() -> None:
    name = "rewriting/body_rewriting.py"
    planted = (
        "\nfrom tensorflow.python.framework import ops\n"
        "def f(op, graph): return op._id, graph._lock, getattr(op, '_op_def')\n"
    )
    assert len(sources().mentions(name, sources().texts[name] + planted)) == 4


def test_everything_that_the_owner_offers_is_there() -> None:
    offered = [
        (module, name)
        for module in (entry_points, modules, names, objects, tapes)
        for name in module.__all__
    ]
    assert [name for module, name in offered if not hasattr(module, name)] == []
    for name in entry_points.__all__:
        value = getattr(entry_points, name)
        if isinstance(value, entry_points.EntryPoint):
            assert callable(value.current), name
