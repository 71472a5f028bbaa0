"""Every tool that ships, on a network of convolutions that ONNX Runtime runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
import onnxruntime
import pytest
from every_tool import EDITING, TOOLS, checked

import amanda
from amanda_core.errors import UnsupportedError
from amanda_tools.dump import Dump
from amanda_tools.flops import Flops
from amanda_tools.graph import GraphTracing
from amanda_tools.nonfinite import NonFinite
from amanda_tools.prune import Prune, PruneNM
from amanda_tools.quantize import Quantize
from amanda_tools.sparsity import Sparsity
from amanda_tools.trace import Trace

from .models import X, conv_net
from .onnxruntime_backends import options

#: Tool -> why it does nothing here, as its result says.
UNSUPPORTED = {
    "effective_path": "there are no rules for its operators",
    "rewrite": "none of the rules is for onnxruntime",
    "rematerialize": "only what PyTorch's autograd saves in eager mode can be evicted",
}


#: Three tools ask for gradients by their options in `TOOLS`.
HERE: dict[str, Callable[[], Any]] = {
    **TOOLS,
    **EDITING,
    "dump": lambda: Dump(values=["inputs", "weights", "outputs"], everything=True),
    "nonfinite": lambda: NonFinite(everything=True),
    "sparsity": lambda: Sparsity(everything=True),
}

pytestmark = pytest.mark.filterwarnings("ignore:The driver 'onnxruntime' has no gradients")


def session() -> onnxruntime.InferenceSession:
    model = conv_net(normalized=False)
    return onnxruntime.InferenceSession(model.SerializeToString(), options(0))


@pytest.mark.parametrize("name", HERE)
def test_the_program_runs_as_without_it(name: str) -> None:
    made, tool = session(), HERE[name]()
    plain = made.run(None, {"x": X})[0]
    with amanda.apply(tool):
        found = [made.run(None, {"x": X})[0] for _ in range(2)]
    checked(name, tool)
    for one in found:
        numpy.testing.assert_array_equal(one, plain)
    reason = UNSUPPORTED.get(name.split()[0])
    if reason is not None:
        where = f"not supported on onnxruntime/{onnxruntime.__version__}"
        assert any(where in note and reason in note for note in tool.result().notes)
    if name == "latency":
        assert all(op.calls and not op.unfinished for op in tool.result().ops)


def test_multiplications_are_those_of_the_definition() -> None:
    tool = Flops()
    with amanda.apply(tool):
        session().run(None, {"x": X})
    stem = 2 * 4 * 8 * 8 * 3 * 3 * 3  # Examples, channels, space, inputs of each output.
    deep = 2 * 4 * 3 * 3 * 3 * 3
    last = 2 * 5 * 4
    counted = json.loads(tool.result().to_json())
    by_name = {op["name"]: op["macs"] for op in counted["ops"] if op.get("macs")}
    assert by_name == {"stem/Conv": stem, "deep/Conv": deep, "fc/Gemm": last}


def _weights(names: list[str]) -> dict[str, Any]:
    """Return the weights that the operators computed with, under the tools that are applied."""
    found: dict[str, Any] = {}

    def look(context: Any) -> None:
        for position, weight in context.weights.items():
            if weight.name in names:
                context.insert_before_op(
                    lambda value, name=weight.name: found.__setitem__(name, value.copy()),
                    inputs=[position],
                    observe=True,
                )

    tool = amanda.Tool()
    tool.add_inst_for_op(look)
    with amanda.apply(tool):
        session().run(None, {"x": X})
    return found


@pytest.mark.parametrize("how", ["magnitude", "two of four"])
def test_pruned_weights_are_those_of_a_reference(how: str) -> None:
    names = ["stem.weight", "fc.weight"]
    given = _weights(names)
    tool: Any = Prune(0.5) if how == "magnitude" else PruneNM(2, 4)
    with amanda.apply(tool):
        found = _weights(names)
    for name in names:
        kept = found[name] != 0
        numpy.testing.assert_array_equal(found[name][kept], given[name][kept])
    weight, kept = given["fc.weight"], found["fc.weight"] != 0
    if how == "magnitude":
        # The smallest half of each weight.
        assert abs(weight[kept]).min() >= abs(weight[~kept]).max()
        assert kept.sum() * 2 == kept.size
    else:
        groups = abs(weight).reshape(-1, 4)  # Along the inputs, which are the last axis of Gemm.
        order = numpy.argsort(-groups, -1)[:, :2]
        expected = numpy.zeros_like(groups, bool)
        numpy.put_along_axis(expected, order, True, -1)
        numpy.testing.assert_array_equal(kept.reshape(-1, 4), expected)


def test_quantized_weights_have_few_values() -> None:
    given = _weights(["fc.weight"])["fc.weight"]
    with amanda.apply(Quantize(weights="int8", activations="none", calibration=0)):
        found = _weights(["fc.weight"])["fc.weight"]
    scale = abs(given).max(1, keepdims=True) / 127
    numpy.testing.assert_allclose(found, numpy.round(given / scale) * scale, rtol=1e-5)


def test_the_graph_is_that_of_the_model() -> None:
    tool = GraphTracing()
    with amanda.apply(tool):
        session().run(None, {"x": X})
    (graph,) = tool.result().graphs
    assert [op.word for op in graph.ops] == [
        *("conv2d", "relu", "conv2d", "identity", "max_pool2d", "adaptive_avg_pool2d"),
        *("reshape", "linear", "softmax"),
    ]


def test_a_trace_has_all_operators() -> None:
    tool = Trace()
    with amanda.apply(tool):
        session().run(None, {"x": X})
    rows = json.loads(tool.result().to_json())["ops"]
    assert [row["name"] for row in rows][:2] == ["stem/Conv", "Relu"]
    assert len(rows) == 9


def test_a_default_that_needs_gradients_is_noted_and_a_request_is_an_error() -> None:
    tool = NonFinite()
    with amanda.apply(tool):
        session().run(None, {"x": X})
    note = f"gradients are not checked on onnxruntime/{onnxruntime.__version__}"
    assert sum(note in one for one in tool.result().notes) == 1
    assert note in tool.result().table().title
    quiet = NonFinite(backward=False)
    with amanda.apply(quiet):
        session().run(None, {"x": X})
    assert not any(note in one for one in quiet.result().notes)
    for asking in (Dump(values=["gradients"]), Sparsity(gradients=True), NonFinite(norms=True)):
        with amanda.apply(asking), pytest.raises(UnsupportedError, match="aligned_gradients"):
            session().run(None, {"x": X})
