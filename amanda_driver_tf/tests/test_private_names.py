"""Private names of TensorFlow stand in one package of the driver."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

import functools
from pathlib import Path

import tensorflow as tf

import amanda_core
from amanda_core.testing.private_names import (
    has_underscore,
    mentions,
    mentions_in_c,
    own_names,
)
from amanda_driver_tf._tensorflow_internals import entry_points, modules, names, objects, tapes

FOLDER = Path(__file__).parents[1] / "src/amanda_driver_tf"
OWNER = "_tensorflow_internals/"


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


def sources() -> dict[str, str]:
    files = (p for end in ("*.py", "*.c", "*.h") for p in FOLDER.rglob(end))
    return {p.relative_to(FOLDER).as_posix(): p.read_text("utf-8") for p in files}


def own() -> frozenset[str]:
    core = Path(amanda_core.__file__).parent.rglob("*.py")
    python = [text for name, text in sources().items() if name.endswith(".py")]
    return own_names([*python, *(path.read_text("utf-8") for path in core)])


def found_in(name: str, text: str, known: frozenset[str]) -> list[str]:
    if name.endswith(".py"):
        places = mentions(text, "tensorflow", known, is_private, theirs())
    else:
        places = mentions_in_c(text, "tensorflow", known)
    return [f"{name}:{line}: {found}" for line, found in places]


def test_private_names_stand_in_their_owner_only() -> None:
    known = own()
    found = [
        line
        for name, text in sources().items()
        if not name.startswith(OWNER)
        for line in found_in(name, text, known)
    ]
    assert found == []


def test_no_function_of_the_c_bindings_is_named_elsewhere() -> None:
    found = [
        f"{name}:{number}"
        for name, text in sources().items()
        if name.endswith(".py") and not name.startswith(OWNER)
        for number, line in enumerate(text.splitlines(), 1)
        if "TFE_Py_" in line.replace("`TFE_Py_", "")
    ]
    assert found == []


def test_the_owner_is_searched_as_all_else() -> None:
    known = own()
    for name in ("modules", "entry_points", "objects", "names"):
        assert found_in(f"{OWNER}{name}.py", sources()[f"{OWNER}{name}.py"], known)


def test_one_that_is_planted_is_found() -> None:
    name = "_graph/weave.py"
    planted = (
        "\nfrom tensorflow.python.framework import ops\n"
        "def f(op, graph): return op._id, graph._lock, getattr(op, '_op_def')\n"
    )
    known, text = own(), sources()[name]
    assert len(found_in(name, text + planted, known)) == 4


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
