"""Models of TensorFlow with the edits of tools, as concrete functions and SavedModels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from taking_out import PORTABLE, refused, running_apart

import amanda
from amanda_core import OpContext
from amanda_core.errors import UnsupportedError

tf = pytest.importorskip("tensorflow")
load_file = pytest.importorskip("safetensors.numpy").load_file

#: Runs in a process of its own: gets a folder a line, and writes what the program in it computes.
APART = """
import sys
from pathlib import Path

import numpy
import tensorflow as tf

print("apart", flush=True)
for line in sys.stdin:
    folder = Path(line.strip())
    try:
        program = tf.saved_model.load(str(folder / "net")).program
        numpy.save(folder / "found.npy", program(tf.constant(numpy.load(folder / "x.npy")))["rows"])
        assert not any(name.startswith("amanda") for name in sys.modules)
        print("done", flush=True)
    except Exception as error:
        print(repr(error)[:500], flush=True)
"""


class Net(tf.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        random = tf.random.Generator.from_seed(1)
        self.first = tf.Variable(random.normal((8, 16)), name="first")
        self.second = tf.Variable(random.normal((16, 4)), name="second")

    def __call__(self, x: Any) -> Any:
        x = tf.nn.relu(x @ self.first)
        # A function of its own is a part of the program, too.
        return {"rows": tf.function(lambda x: tf.matmul(x, self.second, name="inner"))(x)}


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[[Path], Any]]:
    """Return a function that runs a SavedModel in a process without Amanda."""
    with running_apart(APART, lambda folder: np.load(folder / "found.npy")) as run:
        yield run


#: Eager operators have other names than those of functions, so ranges of activations are others.
ROWS = [(name, True) for name in PORTABLE]
ROWS += [(name, False) for name, row in PORTABLE.items() if row.unsaved != "activations"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "in_function"), ROWS)
@pytest.mark.filterwarnings("ignore:.*without the changes of")
def test_what_is_taken_out_gives_what_the_instrumented_model_gave(
    name: str, in_function: bool, apart: Callable[[Path], Any], tmp_path: Path
) -> None:
    make, unsaved, unexported = PORTABLE[name]
    net, x, tool = Net(), tf.random.Generator.from_seed(2).normal((3, 8)), make()
    run = tf.function(net) if in_function else net
    plain, own = net(x)["rows"].numpy(), [one.numpy() for one in net.variables]
    with amanda.apply(tool):
        run(x)  # Ranges are known after it.
        expected = run(x)["rows"].numpy()
    if unexported:
        refused(lambda: amanda.exported(net, tool, x), unexported)
    else:
        assert not np.array_equal(plain, expected)
        program = amanda.exported(net, tool, x)
        assert np.array_equal(program(x)["rows"], expected)
        saved = tf.Module()
        saved.program, saved.kept = program, program.variables
        tf.saved_model.save(saved, str(tmp_path / "net"), signatures=program)
        np.save(tmp_path / "x.npy", x.numpy())
        assert np.array_equal(apart(tmp_path), expected)
    # The model is as before.
    assert np.array_equal(net(x)["rows"], plain)
    assert all(map(np.array_equal, own, net.variables))
    if unsaved == "activations":
        return
    if unsaved:
        refused(lambda: tool.save_baked(tmp_path / "baked"), unsaved)
        refused(lambda: tool.bake(net), unsaved)
        return
    tool.save_baked(tmp_path / "baked")
    baked = load_file(tmp_path / "baked/weights.safetensors")
    assert tool.bake(net) == ["first", "second"]
    assert np.array_equal(net(x)["rows"], expected)
    assert all(np.array_equal(baked[name], getattr(net, name)) for name in ("first", "second"))


@pytest.mark.parametrize("name", ["prune", "quantize dynamic", "steer op", "inject_faults"])
def test_a_function_gives_what_the_instrumented_model_gives(name: str) -> None:
    net, x, tool = Net(), tf.random.Generator.from_seed(2).normal((3, 8)), PORTABLE[name].make()
    plain = net(x)["rows"].numpy()
    with amanda.apply(tool):
        expected = tf.function(net)(x)["rows"].numpy()
    program = amanda.exported(net, tool, x)
    assert np.array_equal(program(x)["rows"], expected)
    assert not np.allclose(plain, expected)
    assert np.array_equal(net(x)["rows"], plain)
    assert {one.name for one in program.variables} == {"first:0", "second:0"}


def test_faults_of_a_weight_that_was_not_read_are_refused() -> None:
    net, x = Net(), tf.random.Generator.from_seed(2).normal((3, 8))
    refused(
        lambda: amanda.exported(net, PORTABLE["inject_faults"].make(), x), "has not been executed"
    )


@pytest.mark.parametrize(("row", "in_function"), [("", False), (" ema", True)])
def test_operators_of_one_name_are_refused_if_their_ranges_differ(
    row: str, in_function: bool
) -> None:
    def net(x: Any) -> Any:
        x = tf.matmul(x, first, name="product")
        # Where all is eager, only this product has the name that both have in the program.
        return tf.function(lambda x: tf.matmul(x, second, name="product"))(x)

    first, second = tf.Variable(tf.ones((4, 4))), tf.Variable(tf.ones((4, 4)))
    x, tool = tf.ones((2, 4)), PORTABLE[f"quantize operands{row}"].make()
    with amanda.apply(tool):
        (tf.function(net) if in_function else net)(x)
    refused(lambda: amanda.exported(net, tool, x), "Several operators are called product")


def test_what_only_the_host_can_run_is_refused_by_name() -> None:
    def double(value: Any) -> Any:
        return value * 2

    def analyse(context: OpContext) -> None:
        if context["type"] == "matmul":
            context.insert_before_op(seen.append, inputs=[0], observe=True)
            if edits:
                context.insert_before_op(double, inputs=[0])

    seen: list[Any] = []
    edits = False
    tool, net, x = amanda.Tool(), Net(), tf.ones((3, 8))
    tool.add_inst_for_op(analyse)
    program = amanda.exported(net, tool, x)
    assert np.array_equal(program(x)["rows"], net(x)["rows"])
    assert not seen
    edits = True
    with pytest.raises(UnsupportedError, match=r"double.*amanda\.staged"):
        amanda.exported(net, tool, x)
