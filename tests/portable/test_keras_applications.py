"""Tools that change nothing change no bit, on one small member of each family of Keras' models.

Each model takes two steps with tape and batch statistics (the first analyses, the second is
cached), plain and with an identity routine at every point of every op. Outputs, gradients and all
variables are compared bit for bit. Functions are compared with TensorFlow's graph optimizer off,
because a plain graph that it fuses rounds differently. How far it moves the plain result, and
whether plain results repeat, is measured and printed. One family is among the slow tests, the
others among the exhaustive ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Everywhere

from .tools import Array

Step = Callable[[], Any]
Values = list[Array]


class Family(NamedTuple):
    """A member of a family, and the smallest image that it accepts.

    With `staged`, the routines are traced into graphs: Keras compiles its grouped convolutions with
    XLA, also in eager mode, because TensorFlow has no gradient for them on a CPU. XLA calls no
    Python.
    """

    name: str
    size: int = 32
    staged: bool = False


#: Module of `keras.applications` -> its smallest member.
FAMILIES = {
    "convnext": Family("ConvNeXtTiny", staged=True),
    "densenet": Family("DenseNet121"),
    "efficientnet": Family("EfficientNetB0"),
    "efficientnet_v2": Family("EfficientNetV2B0"),
    "inception_resnet_v2": Family("InceptionResNetV2", 75),
    "inception_v3": Family("InceptionV3", 75),
    "mobilenet": Family("MobileNet"),
    "mobilenet_v2": Family("MobileNetV2"),
    "mobilenet_v3": Family("MobileNetV3Small"),
    "nasnet": Family("NASNetMobile"),
    "resnet": Family("ResNet50"),
    "resnet_v2": Family("ResNet50V2"),
    "vgg16": Family("VGG16"),
    "vgg19": Family("VGG19"),
    "xception": Family("Xception", 71),
}


def sampled(sample: str) -> list[Any]:
    """Return all families; all but one are marked as exhaustive."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name == sample else pytest.mark.exhaustive)
        for name in FAMILIES
    ]


#: Depthwise convolutions, dropout and batch norm; eagerly with residuals, too.
SAMPLE = sampled("mobilenet")
EAGER_SAMPLE = sampled("mobilenet_v3")

STEPS = 2


# What identity means.


def nothing(*values: Any) -> None:
    """Return None: nothing is changed."""


def same(*values: Any) -> Any:
    """Return the same objects."""
    return values


def copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    if not tf.is_tensor(value):
        return value
    if isinstance(value, tf.IndexedSlices) or not value.dtype.is_floating:
        return tf.identity(value)
    return tf.raw_ops.DeepCopy(x=value)


def copies(*values: Any) -> Any:
    """Return copies; to the driver each is a change."""
    return tuple(copied(value) for value in values)


VARIANTS: dict[str, Callable[..., Any]] = {"none": nothing, "same": same, "copies": copies}


@amanda.staged
def nothing_in_graph(*values: Any) -> None:
    """Return None: nothing is changed."""


@amanda.staged
def same_in_graph(*values: Any) -> Any:
    """Return the same objects."""
    return values


@amanda.staged
def copies_in_graph(*values: Any) -> Any:
    """Return TensorFlow's identities, because XLA has no other copy."""
    return tuple(
        tf.nest.map_structure(lambda v: tf.identity(v) if tf.is_tensor(v) else v, value)
        for value in values
    )


STAGED: dict[str, Callable[..., Any]] = {
    "none": nothing_in_graph,
    "same": same_in_graph,
    "copies": copies_in_graph,
}


def variant_of(family: str, variant: str) -> Callable[..., Any]:
    return (STAGED if FAMILIES[family].staged else VARIANTS)[variant]


class Identity(Everywhere):
    """Calls `routine` at all points, and records the types of the ops."""

    def __init__(self, routine: Callable[..., Any]) -> None:
        super().__init__(routine)
        self.forward_types: set[str] = set()
        self.backward_types: set[str] = set()

    def forward(self, context: amanda.OpContext) -> None:
        self.forward_types.add(context.op_type)
        super().forward(context)

    def backward(self, context: amanda.OpContext) -> None:
        self.backward_types.add(context.op_type)
        super().backward(context)


# The programs.


class Application:
    """A model with its batch, whose state can be restored."""

    def __init__(self, family: str) -> None:
        name, size, _ = FAMILIES[family]
        keras.utils.set_random_seed(0)
        build = getattr(keras.applications, name)
        self.model = build(weights=None, input_shape=(size, size, 3), classes=4)
        self.images = tf.random.stateless_uniform([2, size, size, 3], (1, 2))
        # `get_weights` leaves out the states of random generators.
        self.start = [variable.numpy() for variable in self.model.variables]

    def restart(self) -> None:
        for variable, value in zip(self.model.variables, self.start, strict=True):
            variable.assign(value)

    def forward(self) -> Any:
        return self.model(self.images, training=True)

    def step_with(self, forward: Step) -> Step:
        def step() -> Any:
            with tf.GradientTape() as tape:
                y = forward()
                loss = tf.reduce_sum(y * y)
            return y, loss, tape.gradient(loss, self.model.trainable_variables)

        return step

    def step_of(self, mode: str) -> Step:
        """Return a step in this mode; a function is not traced yet."""
        if mode == "eager":
            return self.step_with(self.forward)
        if mode == "function":
            return self.step_with(tf.function(self.forward))
        step: Step = tf.function(self.step_with(self.forward))
        return step

    def values(self, step: Step) -> Values:
        """Return the results of some steps, and the variables afterwards."""
        self.restart()
        results = [tf.nest.flatten(step()) for _ in range(STEPS)]
        found = [np.asarray(tf.convert_to_tensor(value)) for values in results for value in values]
        return found + [variable.numpy() for variable in self.model.variables]


@functools.lru_cache(maxsize=1)
def application(family: str) -> Application:
    """Provide one model at a time, because they are large."""
    keras.backend.clear_session()
    return Application(family)


@contextmanager
def optimiser(on: bool) -> Iterator[None]:
    """Turn TensorFlow's optimization of function graphs on or off."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not on})
    try:
        yield
    finally:
        off = before.get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


def distance(one: Values, other: Values) -> float:
    """Return the largest difference between first outputs, as a share of the largest output.

    Gradients are not compared: many are zero except for rounding, so their differences say nothing.
    """
    return float(np.abs(one[0] - other[0]).max() / np.abs(other[0]).max())


def differing(one: Values, other: Values, fused: Values | None = None) -> int:
    """Return how many tensors differ in bits between `one` and `other`, or `one` and `fused`.

    oneDNN fuses a convolution's filter gradient with its bias', even with the optimizer off. With a
    routine between them they are as in eager mode.
    """
    triples = zip(one, other, fused or other, strict=True)
    return sum(a.tobytes() not in (b.tobytes(), c.tobytes()) for a, b, c in triples)


def assert_same(family: str, values: Values, expected: Values, fused: Values | None = None) -> None:
    """Check equality bit for bit, unless XLA compiles another program because of an additional
    node.
    """
    if not FAMILIES[family].staged:
        assert differing(values, expected, fused) == 0
        return
    for value, wanted in zip(values, expected, strict=True):
        scale = float(np.abs(wanted).max(initial=0)) if wanted.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-3 * scale)


# The list.


def test_every_family_is_listed() -> None:
    modules = {name for name in dir(keras.applications) if name[0].islower()}
    assert modules - {"imagenet_utils", "resnet50"} == set(FAMILIES)


# Eager.


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str], Values]:
    """Provide the values of plain runs so far."""
    return {}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", EAGER_SAMPLE)
def test_identity_in_eager_mode(
    family: str, variant: str, plain: dict[tuple[str, str], Values]
) -> None:
    network = application(family)
    step = network.step_of("eager")
    if (family, "eager") not in plain:
        plain[family, "eager"] = network.values(step)
        assert differing(network.values(step), plain[family, "eager"]) == 0
    tool = Identity(variant_of(family, variant))
    with amanda.apply(tool):
        values = network.values(step)
    assert_same(family, values, plain[family, "eager"])
    assert "Conv2D" in tool.forward_types
    assert "Conv2DBackpropFilter" in tool.backward_types


# Functions.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", ["function", "step function"])
@pytest.mark.parametrize("family", SAMPLE)
def test_identity_in_functions(
    family: str, mode: str, variant: str, plain: dict[tuple[str, str], Values]
) -> None:
    network = application(family)
    if (family, "eager") not in plain:
        plain[family, "eager"] = network.values(network.step_of("eager"))
    with optimiser(on=False):
        step = network.step_of(mode)
        if (family, mode) not in plain:
            plain[family, mode] = network.values(step)
            assert differing(network.values(step), plain[family, mode]) == 0
        tool = Identity(variant_of(family, variant))
        with amanda.apply(tool):
            values = network.values(step)
    assert_same(family, values, plain[family, "eager"], fused=plain[family, mode])
    assert "Conv2D" in tool.forward_types
    assert "Conv2DBackpropFilter" in tool.backward_types


@pytest.mark.parametrize("family", SAMPLE)
def test_identity_in_an_optimised_function(
    family: str,
    capsys: pytest.CaptureFixture[str],
    plain: dict[tuple[str, str], Values],
) -> None:
    network = application(family)
    step = network.step_of("step function")
    first, again = network.values(step), network.values(step)
    with optimiser(on=False):
        unoptimised = network.values(network.step_of("step function"))
    eager = network.values(network.step_of("eager"))
    with amanda.apply(Identity(variant_of(family, "same"))):
        instrumented = network.values(step)
    moved = distance(first, unoptimised)
    with capsys.disabled():
        print(
            f"\n{FAMILIES[family].name}: plain function, run to run:"
            f" {differing(first, again)} of {len(first)} tensors differ;"
            f" optimised against not: {differing(first, unoptimised)}, by {moved:.1e};"
            f" not optimised against eager: {differing(eager, unoptimised)};"
            f" instrumented against plain: {differing(instrumented, first)},"
            f" against not optimised: {differing(instrumented, unoptimised)}"
        )
    # No tensor but what plain TensorFlow gives, with its optimiser or without.
    assert_same(family, instrumented, unoptimised, fused=first)
