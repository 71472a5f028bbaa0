"""Models whose weights stand in a file, and are too large for the text of a model."""

from __future__ import annotations

import os
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, external_data_helper, helper

import amanda
from amanda_core.cli import app
from amanda_core.driver_kit import OpContext
from amanda_driver_onnxruntime.onnxruntime_internals import sessions

from .onnxruntime_backends import options

#: Rows and columns of a weight of over 2 GiB, and of a small one.
LARGE, SMALL = (4096, 65_600), (16, 32)
ROW = 3


TOOL = '''
import numpy
import amanda


class Threshold(amanda.Tool):
    """Sets weights near zero to zero. `prune` would sort them for minutes."""

    def __init__(self):
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        for position in context.weights:
            context.insert_before_op(self.prune, inputs=[position])

    def prune(self, weight):
        return numpy.where(abs(weight) > 0.5, weight, 0)
'''


class Looking(amanda.Tool):
    """Counts executions."""

    def __init__(self, *, observe: bool) -> None:
        super().__init__()
        self.count, self.observe = 0, observe
        self.add_inst_for_op(self.look)

    def look(self, context: OpContext) -> None:
        context.insert_before_op(self.note, observe=self.observe)
        context.insert_after_op(self.note, observe=self.observe)

    def note(self, *values: Any) -> None:
        self.count += 1


def made(folder: Path, rows: int, columns: int) -> tuple[Path, Any]:
    """Write a model that picks a row of a matrix of 64 bits; return its file and the matrix.

    ONNX Runtime does not pack the weights of this operator, of which it would have a second copy.
    """
    generator, path = numpy.random.default_rng(0), folder / "weights.bin"
    with path.open("wb") as file:
        for _ in range(rows):
            file.write(generator.standard_normal(columns).tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.DOUBLE, dims=[rows, columns])
    weight.raw_data = b"0"  # As `set_external_data` wants it.
    external_data_helper.set_external_data(weight, path.name, 0, path.stat().st_size)
    weight.ClearField("raw_data")
    nodes = [
        helper.make_node("Gather", ["w", "x"], ["h"], "row"),
        helper.make_node("Neg", ["h"], ["y"], "negative"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.INT64, [1])
    y = helper.make_tensor_value_info("y", TensorProto.DOUBLE, [1, columns])
    graph = helper.make_graph(nodes, "large", [x], [y], [weight])
    opsets = [helper.make_opsetid("", 18)]
    onnx.save_model(
        helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "model.onnx"
    )
    return folder / "model.onnx", numpy.memmap(path, numpy.float64, "r", shape=(rows, columns))


def check(folder: Path, shape: tuple[int, int]) -> None:
    """Prune, export and watch a model, and compare with the numbers in its file."""
    path, weight = made(folder, *shape)
    (folder / "pruning.py").write_text(TOOL)
    tool = f"{folder / 'pruning.py'}:Threshold"
    x = numpy.array([ROW])
    numpy.savez(folder / "x.npz", x=x)
    new = folder / "new" / "model.onnx"
    new.parent.mkdir()
    inputs = ["--inputs", str(folder / "x.npz")]
    # It compares the new model with the session under the tool.
    assert app.parse(["export", str(path), "-t", tool, *inputs, "-o", str(new)]) == 0
    (stored,) = onnx.load_model(new, load_external_data=False).graph.initializer
    where = external_data_helper.ExternalDataInfo(stored)
    found = numpy.memmap(new.parent / where.location, numpy.float64, "r", where.offset or 0, shape)
    for one, old in zip(found, weight, strict=True):
        assert (one == old * (abs(old) > 0.5)).all()
    for watching in (Looking(observe=True), Looking(observe=False)):
        # Each session has the weight in its memory, as its parts have.
        session = onnxruntime.InferenceSession(str(path), options(0))
        with amanda.apply(watching):
            for _ in range(2):
                (row,) = session.run(None, {"x": x})[0]
                assert (row == -weight[ROW]).all()
        assert watching.count == 8
        del session


def test_weights_that_are_passed_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take the way of large models for a small one."""
    monkeypatch.setattr(sessions, "LARGEST", 0)
    passed: list[str] = []
    plain = onnxruntime.SessionOptions.add_external_initializers

    def passing(self: Any, names: list[str], values: list[Any]) -> None:
        passed.extend(names)
        plain(self, names, values)

    monkeypatch.setattr(onnxruntime.SessionOptions, "add_external_initializers", passing)
    check(tmp_path, SMALL)
    assert passed


@pytest.mark.exhaustive
def test_a_model_of_over_two_gigabytes(tmp_path: Path) -> None:
    """Run under watching, pruning and export what protobuf cannot write."""
    size = LARGE[0] * LARGE[1] * 8
    free = shutil.disk_usage(tmp_path).free
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if free < 3 * size or memory < 8 * size:
        pytest.skip(f"it needs {3 * size} bytes of disk and {8 * size} of memory: {free}, {memory}")
    try:
        check(tmp_path, LARGE)
    except Exception as error:  # pytest's own report would write all numbers.
        pytest.fail("".join(traceback.format_exception(error, limit=-8)), pytrace=False)
    finally:
        shutil.rmtree(tmp_path)  # pytest keeps it otherwise.
