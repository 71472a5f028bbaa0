"""The tutorial's TensorFlow programs in today's spelling, counted in every mode.

The tutorial (ASPLOS '24) counts the convolutions of a ResNet-50, forward and backward, by names of
graph nodes. Names contain scopes and depend on who built the graph. Here the same tool compares op
types, and the counts by names are shown as well. `docs/paper.md` has the corrected lines. The
expected counts are read from TensorFlow's own graphs.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.mapping import MappingTool

from .resnet50_v1 import CONVOLUTIONS, resnet50

v1 = tf.compat.v1


class CountOPTool(amanda.Tool):
    """The tutorial's, but for the comparison: of op types, by equality."""

    def __init__(self, op_name: str, backward_op_name: str) -> None:
        super().__init__()
        self.counter = 0
        self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_name = backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if self.op_name == op.type:
            context.insert_before_op(self.counter_op)

    # analysis routine, filter conv2d operators
    def backward_callback(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op()
        if self.backward_op_name == op.type:
            context.insert_after_backward_op(self.counter_backward_op)

    # instrumentation routine: op for counting
    def counter_op(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs

    def counter_backward_op(self, *inputs: Any) -> Any:
        self.backward_counter += 1
        return inputs


class NamedCountOPTool(CountOPTool):
    """As printed in the tutorial: by names that contain the given ones."""

    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if self.op_name in op.name:
            context.insert_before_op(self.counter_op)

    def backward_callback(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op()
        if self.backward_op_name in op.name:
            context.insert_after_backward_op(self.counter_backward_op)


def torch_op_name_rule(context: amanda.OpContext) -> None:
    context["op_name"] = context.get_op().__name__
    context["backward_op_name"] = (
        context.get_backward_op().__name__ if context.get_backward_op() is not None else None
    )


def tf_op_name_rule(context: amanda.OpContext) -> None:
    context["op_name"] = context.get_op().name if context.get_op() is not None else None
    context["backward_op_name"] = (
        context.get_backward_op().name if context.get_backward_op() is not None else None
    )


mapping_tool = MappingTool(
    rules=[
        ["pytorch", torch_op_name_rule],
        ["tensorflow", tf_op_name_rule],
    ]
)


class MappedCountOPTool(CountOPTool):
    """As printed in the tutorial: by the names that the rules put into contexts."""

    def __init__(self, op_name: str, backward_op_name: str) -> None:
        super().__init__(op_name, backward_op_name)
        # specify tool dependencies
        self.depends_on(mapping_tool)

    # analysis routine, filter conv2d operators
    def callback(self, context: amanda.OpContext) -> None:
        if self.op_name in context["op_name"]:
            context.insert_before_op(self.counter_op)

    # analysis routine, filter conv2d operators
    def backward_callback(self, context: amanda.OpContext) -> None:
        if self.backward_op_name in context["backward_op_name"]:
            context.insert_after_backward_op(self.counter_backward_op)


def counting(tool: type[CountOPTool] = CountOPTool) -> CountOPTool:
    return tool(op_name="Conv2D", backward_op_name="Conv2DBackpropFilter")


def types_of(operations: Iterable[Any]) -> collections.Counter[str]:
    return collections.Counter(op.type for op in operations)


def test_the_closed_form() -> None:
    # The stem, three in each of 16 blocks, and a projection for each of four stages.
    assert CONVOLUTIONS == 1 + 3 * (3 + 4 + 6 + 3) + 4 == 53


# Keras.


@pytest.fixture(scope="module")
def model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3))


@pytest.fixture(scope="module")
def x() -> Any:
    return tf.random.stateless_uniform([1, 64, 64, 3], seed=(1, 2))


def step_of(model: Any, forward: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return output and gradients of a batch."""

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = forward(x) if forward is not None else model(x)
        return y, tape.gradient(y, model.trainable_variables)

    return step


@pytest.fixture(scope="module")
def traced_step(model: Any, x: Any) -> Any:
    """Return a step with its tape in one function, which has run before any tool was applied."""
    step = tf.function(step_of(model))
    step(x)
    return step


def test_counting_in_eager_mode(model: Any, x: Any) -> None:
    step = step_of(model)
    y, gradients = step(x)
    tool = counting()
    with amanda.tool.apply(tool):
        for run in (1, 2):
            counted, counted_gradients = step(x)
            assert (tool.counter, tool.backward_counter) == (53 * run, 53 * run)
    assert np.array_equal(counted, y)
    for one, other in zip(counted_gradients, gradients, strict=True):
        assert np.array_equal(one, other)
    step(x)
    assert (tool.counter, tool.backward_counter) == (106, 106)


@pytest.mark.slow
@pytest.mark.parametrize("traced", ["before", "inside"])
def test_counting_in_a_function_under_a_tape(model: Any, x: Any, traced: str) -> None:
    forward = tf.function(lambda x: model(x))
    step = step_of(model, forward)
    y, gradients = step(x) if traced == "before" else step_of(model)(x)
    tool = counting()
    with amanda.tool.apply(tool):
        for run in (1, 2):
            counted, counted_gradients = step(x)
            assert (tool.counter, tool.backward_counter) == (53 * run, 53 * run)
    np.testing.assert_allclose(counted, y, rtol=1e-4, atol=1e-6)
    for one, other in zip(counted_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    graph = forward.get_concrete_function(x).graph
    assert types_of(graph.get_operations())["Conv2D"] == 53
    step(x)
    assert (tool.counter, tool.backward_counter) == (106, 106)


@pytest.mark.slow
@pytest.mark.parametrize("traced", ["before", "inside"])
def test_counting_in_a_function_with_its_tape(
    model: Any, x: Any, traced: str, traced_step: Any
) -> None:
    step = traced_step if traced == "before" else tf.function(step_of(model))
    tool = counting()
    with amanda.tool.apply(tool):
        for run in (1, 2):
            step(x)
            assert (tool.counter, tool.backward_counter) == (53 * run, 53 * run)
    types = types_of(step.get_concrete_function(x).graph.get_operations())
    assert (types["Conv2D"], types["Conv2DBackpropFilter"]) == (53, 53)
    step(x)
    assert (tool.counter, tool.backward_counter) == (106, 106)


def test_names_in_a_function(x: Any, traced_step: Any) -> None:
    # Keras calls the node "convolution" and not "Conv2D"; gradients are called after their type.
    names = [op.name for op in traced_step.get_concrete_function(x).graph.get_operations()]
    gradients = [name for name in names if "Conv2DBackpropFilter" in name]
    assert len(gradients) == 53
    assert not [name for name in names if "Conv2D" in name and "Conv2DBackprop" not in name]
    counter = counting(NamedCountOPTool)
    with amanda.tool.apply(counter):
        traced_step(x)
    assert (counter.counter, counter.backward_counter) == (0, 53)


# Sessions.


class Program:
    """The tutorial's: a graph with the gradients of `y` for `x` or for the variables."""

    def __init__(self, resource: bool, of_variables: bool = True) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [2, 32, 32, 3])
            self.y = resnet50(self.x, resource=resource)
            xs = v1.trainable_variables() if of_variables else self.x
            self.g = v1.gradients(self.y, xs)
            self.session = v1.Session(graph=self.graph)
            self.session.run(v1.global_variables_initializer())

    def run(self) -> Any:
        images = np.random.default_rng(0).uniform(size=(2, 32, 32, 3))
        return self.session.run([self.y, self.g], {self.x: images})

    def executed(self) -> list[Any]:
        """Return the nodes that the gradients need."""
        found: dict[str, Any] = {}
        waiting = [tensor.op for tensor in (self.y, *self.g)]
        while waiting:
            op = waiting.pop()
            if op.name not in found:
                found[op.name] = op
                waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("built", ["before", "inside"])
def test_counting_in_a_session(built: str, resource: bool) -> None:
    tool = counting()
    program = Program(resource) if built == "before" else None
    plain = program.run() if program is not None else None
    with amanda.tool.apply(tool):
        program = program or Program(resource)
        assert (tool.counter, tool.backward_counter) == (0, 0)
        for run in (1, 2, 3):
            counted = program.run()
            assert (tool.counter, tool.backward_counter) == (53 * run, 53 * run)
    types = types_of(program.executed())
    assert (types["Conv2D"], types["Conv2DBackpropFilter"]) == (53, 53)
    after = program.run()
    assert (tool.counter, tool.backward_counter) == (159, 159)
    for values in (plain or after, counted):
        for one, other in zip(tf.nest.flatten(values), tf.nest.flatten(after), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tool", [NamedCountOPTool, MappedCountOPTool])
@pytest.mark.parametrize(("resource", "expected"), [(True, 106), (False, 53)])
def test_names_in_a_session(resource: bool, expected: int, tool: type[CountOPTool]) -> None:
    # 106 is printed: TensorFlow calls the node that reads a resource variable for a convolution
    # "conv/Conv2D/ReadVariableOp", and there is "Conv2D" in it. Reference variables are read by a
    # node of their own scope, "kernel/read", for all.
    program = Program(resource)
    matching = [
        op.type
        for op in program.executed()
        if "Conv2D" in op.name and not op.name.startswith("gradients/")
    ]
    assert len(matching) == expected
    assert set(matching) == ({"Conv2D", "ReadVariableOp"} if resource else {"Conv2D"})
    counter = counting(tool)
    with amanda.tool.apply(counter):
        program.run()
    assert (counter.counter, counter.backward_counter) == (expected, 53)


def test_gradients_that_nobody_asks_for_do_not_run() -> None:
    # As printed, `tf.gradients(y, x)` asks for the image's gradient only: there are 53 nodes
    # for the filters' gradients, and a session runs none of them. The printed 53 counts them.
    program = Program(resource=True, of_variables=False)
    nodes = types_of(program.graph.get_operations())
    executed = types_of(program.executed())
    assert (nodes["Conv2DBackpropFilter"], executed["Conv2DBackpropFilter"]) == (53, 0)
    assert executed["Conv2DBackpropInput"] == 53
    tool = counting()
    inputs = CountOPTool(op_name="Conv2D", backward_op_name="Conv2DBackpropInput")
    with amanda.tool.apply(tool, inputs):
        program.run()
    assert (tool.counter, tool.backward_counter) == (53, 0)
    assert inputs.backward_counter == 53


def test_the_numbers_printed_last() -> None:
    # The last program prints 212 and 159, which its comparisons do not give. As many are the nodes
    # with "Conv2D" in their names, and the gradients' nodes among them, of a graph with reference
    # variables: 4 x 53 and 3 x 53. Where the printed numbers come from is not known.
    names = [op.name for op in Program(resource=False).graph.get_operations()]
    matching = [name for name in names if "Conv2D" in name]
    gradients = [name for name in matching if "Conv2D_grad/" in name]
    assert (len(matching), len(gradients)) == (212, 159)
    assert len([name for name in gradients if "Conv2DBackpropFilter" in name]) == 53
