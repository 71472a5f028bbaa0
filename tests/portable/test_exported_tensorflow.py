"""Models of TensorFlow with the edits of tools, as concrete functions and SavedModels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amanda
from amanda_core import OpContext
from amanda_core.errors import UnsupportedError
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

tf = pytest.importorskip("tensorflow")


class Net(tf.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        random = tf.random.Generator.from_seed(1)
        self.first = tf.Variable(random.normal((8, 16)), name="first")
        self.second = tf.Variable(random.normal((16, 4)), name="second")

    def __call__(self, x: Any) -> Any:
        x = tf.nn.relu(x @ self.first)
        # A function of its own is a part of the program, too.
        return {"rows": tf.function(lambda x: x @ self.second)(x)}


@pytest.mark.parametrize(
    "make", [lambda: Prune(0.5), lambda: Quantize("dynamic")], ids=["prune", "quantize"]
)
def test_a_function_gives_what_the_instrumented_model_gives(make: Any) -> None:
    net, x, tool = Net(), tf.random.Generator.from_seed(2).normal((3, 8)), make()
    plain = net(x)["rows"].numpy()
    with amanda.apply(tool):
        expected = tf.function(net)(x)["rows"].numpy()
    program = amanda.exported(net, tool, x)
    np.testing.assert_allclose(program(x)["rows"], expected, rtol=1e-6, atol=1e-6)
    assert not np.allclose(plain, expected)
    assert np.array_equal(net(x)["rows"], plain)
    assert {one.name for one in program.variables} == {"first:0", "second:0"}


@pytest.mark.slow
def test_a_saved_model_needs_no_amanda(tmp_path: Path) -> None:
    net, x, tool = Net(), tf.random.Generator.from_seed(2).normal((3, 8)), Prune(0.5)
    with amanda.apply(tool):
        expected = net(x)["rows"].numpy()
    program = amanda.exported(net, tool, x)
    saved = tf.Module()
    saved.program, saved.kept = program, program.variables
    tf.saved_model.save(saved, str(tmp_path / "net"), signatures=program)
    np.save(tmp_path / "x.npy", x.numpy())
    script = (
        "import sys, numpy, tensorflow as tf\n"
        f"net = tf.saved_model.load({str(tmp_path / 'net')!r})\n"
        f"x = tf.constant(numpy.load({str(tmp_path / 'x.npy')!r}))\n"
        "found = net.program(x)['rows'].numpy()\n"
        f"numpy.save({str(tmp_path / 'found.npy')!r}, found)\n"
        "assert not any(name.startswith('amanda') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=300)
    found = np.load(tmp_path / "found.npy")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


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
