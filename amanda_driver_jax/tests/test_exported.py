"""Functions of JAX with the edits of tools, as programs that `jax.export` makes."""

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

jax = pytest.importorskip("jax")

#: Runs in a process of its own: gets a folder a line, and writes what the program in it computes.
APART = """
import sys
from pathlib import Path

import jax.export
import numpy

print("apart", flush=True)
for line in sys.stdin:
    folder = Path(line.strip())
    try:
        program = jax.export.deserialize(bytearray((folder / "net.bin").read_bytes()))
        numpy.save(folder / "found.npy", program.call(numpy.load(folder / "x.npy")))
        assert not any(name.startswith("amanda") for name in sys.modules)
        print("done", flush=True)
    except Exception as error:
        print(repr(error)[:500], flush=True)
"""


def model(parameters: Any, x: Any) -> Any:
    for kernel in parameters:
        x = jax.nn.relu(x @ kernel)
    return {"rows": x}


@pytest.fixture
def given() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    kernels = [jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (16, 4))]
    return kernels, jax.random.normal(keys[2], (3, 8))


@pytest.mark.parametrize("name", ["prune", "quantize dynamic", "steer op", "inject_faults"])
def test_a_program_gives_what_the_instrumented_function_gives(given: Any, name: str) -> None:
    make, jitted = PORTABLE[name].make, jax.jit(model)
    tool = make()
    with amanda.apply(tool):
        expected = jitted(*given)["rows"]
    program = amanda.exported(jitted, tool, *given)
    again = jax.export.deserialize(program.serialize())
    assert np.array_equal(again.call(*given)["rows"], expected)
    assert not np.array_equal(jitted(*given)["rows"], expected)
    # A function that is not jitted, in a list of tools.
    program = amanda.exported(model, [tool], *given)
    assert np.array_equal(program.call(*given)["rows"], expected)
    # And without tools it is the plain one, in a session or not.
    plain = jax.export.export(jitted)(*given)
    assert np.array_equal(plain.call(*given)["rows"], jitted(*given)["rows"])


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[[Path], Any]]:
    """Return a function that runs a program in a process without Amanda."""
    with running_apart(APART, lambda folder: np.load(folder / "found.npy")) as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.filterwarnings("ignore:.*without the changes of")
def test_what_is_taken_out_gives_what_the_instrumented_module_gave(
    name: str, jitted: bool, apart: Callable[[Path], Any], tmp_path: Path
) -> None:
    nnx = pytest.importorskip("flax.nnx")
    make, unsaved, unexported = PORTABLE[name]
    layers = [nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))]
    net = nnx.Sequential(layers[0], jax.nn.relu, layers[1])
    x, tool = jax.random.normal(jax.random.key(2), (3, 8)), make()
    own = [np.asarray(one.kernel[...]) for one in layers]
    run = nnx.jit(net) if jitted else net
    plain = np.asarray(run(x))
    with amanda.apply(tool):
        np.asarray(run(x))  # Ranges and thresholds are known after it.
        amanda.step()
        expected = np.asarray(run(x))
    if unexported:
        refused(lambda: amanda.exported(net, tool, x), unexported)
    else:
        assert not np.array_equal(plain, expected)
        program = amanda.exported(net, tool, x)
        (tmp_path / "net.bin").write_bytes(program.serialize())
        np.save(tmp_path / "x.npy", x)
        found = apart(tmp_path)
        # What the compiler fuses may be rounded in another place.
        assert (np.array_equal if jitted else np.allclose)(found, expected)
    # The module is as before.
    assert np.array_equal(run(x), plain)
    assert all(np.array_equal(one.kernel[...], was) for one, was in zip(layers, own, strict=True))
    if unsaved == "activations":
        return
    if unsaved:
        refused(lambda: tool.save_baked(tmp_path / "baked"), unsaved)
        return
    load_file = pytest.importorskip("safetensors.numpy").load_file
    tool.save_baked(tmp_path / "baked")
    saved = load_file(tmp_path / "baked/weights.safetensors")
    for number, layer in zip((0, 2), layers, strict=True):
        layer.kernel[...] = saved[f"layers.{number}.kernel"]
    run = nnx.jit(net) if jitted else net  # The values are constants of the function.
    assert np.allclose(run(x), expected)


def test_faults_of_a_weight_that_was_not_read_are_refused(given: Any) -> None:
    tool = PORTABLE["inject_faults"].make()
    refused(lambda: amanda.exported(model, tool, *given), "has not been executed")


def test_what_only_the_host_can_run_is_refused_by_name(given: Any) -> None:
    def double(value: Any) -> Any:
        return value * 2

    def analyse(context: OpContext) -> None:
        if context["type"] == "matmul":
            context.insert_before_op(seen.append, inputs=[0], observe=True)
            if edits:
                context.insert_before_op(double, inputs=[0])

    seen: list[Any] = []
    edits = False
    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    program = amanda.exported(model, tool, *given)
    assert np.array_equal(program.call(*given)["rows"], model(*given)["rows"])
    assert not seen
    edits = True
    with pytest.raises(UnsupportedError, match=r"double.*amanda\.staged"):
        amanda.exported(model, tool, *given)
    assert np.array_equal(model(*given)["rows"], jax.jit(model)(*given)["rows"])
