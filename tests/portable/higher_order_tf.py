"""Programs of second and mixed order in TensorFlow; each returns its results."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["PROGRAMS"]


def _numbers(seed: int, *shape: int) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) / 2).astype(np.float32)


X = tf.constant(_numbers(0, 4, 6))


class _Network:
    """Two dense layers with a nonlinearity between them."""

    def __init__(self, compiled: bool = True) -> None:
        self.first = tf.Variable(_numbers(1, 6, 5))
        self.second = tf.Variable(_numbers(2, 5, 3))
        self.variables = [self.first, self.second]
        self.call = tf.function(self.compute) if compiled else self.compute

    def compute(self, x: Any) -> Any:
        """Return the logits."""
        return tf.tanh(x @ self.first) @ self.second


def _keras() -> Any:
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((6,)),
            layers.Dense(5, activation="gelu"),
            layers.LayerNormalization(),
            layers.Dense(3),
        ]
    )


def _gradient(function: Callable[[Any], Any], x: Any) -> Any:
    """Return the gradient of `function` at `x`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def _second_gradients(function: Callable[[Any], Any], x: Any, *variables: Any) -> list[Any]:
    """Return the gradient of `function` at `x`, and its own for `x` and `variables`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        gradient = _gradient(function, x)
    return [gradient, *tape.gradient(gradient, [x, *variables])]


def gradient_of_a_gradient() -> list[Any]:
    network = _Network()
    return _second_gradients(lambda x: tf.reduce_sum(network.call(x) ** 2), X)


def gradient_penalty() -> list[Any]:
    """Train the critic of WGAN-GP, compiled, for three steps."""
    critic = _Network()
    optimizer = tf.keras.optimizers.Adam(0.01)
    losses = []
    for step in range(3):
        real, fake = (tf.constant(_numbers(seed + step, 4, 6)) for seed in (10, 20))
        with tf.GradientTape() as outer:
            between = (real + fake) / 2
            norms = tf.norm(_gradient(critic.call, between), axis=1)
            penalty = tf.reduce_mean((norms - 1) ** 2)
            loss = tf.reduce_mean(critic.call(fake)) - tf.reduce_mean(critic.call(real)) + penalty
        gradients = outer.gradient(loss, critic.variables)
        optimizer.apply_gradients(zip(gradients, critic.variables, strict=True))
        losses.append(loss)
    return [*losses, *critic.variables]


def gradient_penalty_in_a_step() -> list[Any]:
    critic = _Network()

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            penalty = tf.reduce_sum(_gradient(critic.call, x) ** 2)
        return outer.gradient(penalty, critic.variables)

    return [*step(X), *step(X * 2)]


def nested_tapes_in_a_function() -> list[Any]:
    network = _Network(compiled=False)

    @tf.function
    def second(x: Any) -> Any:
        return _second_gradients(
            lambda x: tf.reduce_sum(network.call(x) ** 3), x, *network.variables
        )

    return list(second(X))


def symbolic_gradients() -> list[Any]:
    """Compute tf.gradients of tf.gradients."""

    @tf.function
    def second(x: Any) -> Any:
        y = tf.sin(x) * x**2
        (first,) = tf.gradients(y, x)
        return first, *tf.gradients(first, x)

    return list(second(X))


def third_order() -> list[Any]:
    @tf.function
    def cubed(x: Any) -> Any:
        return tf.exp(x) * x**3

    with tf.GradientTape() as a:
        a.watch(X)
        with tf.GradientTape() as b:
            b.watch(X)
            with tf.GradientTape() as c:
                c.watch(X)
                y = cubed(X)
            first = c.gradient(y, X)
        second = b.gradient(first, X)
    return [first, second, a.gradient(second, X)]


def jacobian() -> list[Any]:
    network = _Network()
    with tf.GradientTape() as tape:
        y = network.call(X)
    return list(tape.jacobian(y, network.variables))


def jacobian_of_keras() -> list[Any]:
    model = _keras()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = model(X)
    return [tape.jacobian(y, X), *tape.jacobian(y, model.trainable_variables)]


def jacobian_in_a_function() -> list[Any]:
    network = _Network(compiled=False)

    @tf.function
    def whole(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = network.call(x)
        return tape.jacobian(y, network.variables)

    return list(whole(X))


def jacobian_by_a_loop() -> list[Any]:
    network = _Network()

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = network.call(X)
    return [tape.jacobian(y, X, experimental_use_pfor=False)]


def batch_jacobian() -> list[Any]:
    network = _Network()
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = network.call(X)
    return [tape.batch_jacobian(y, X)]


def hessian() -> list[Any]:
    network = _Network()
    with tf.GradientTape() as tape:
        tape.watch(X)
        gradient = _gradient(lambda x: tf.reduce_sum(network.call(x) ** 2), X)
    return [tape.jacobian(gradient, X)]


def accumulator_over_a_function() -> list[Any]:
    network = _Network()
    with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as accumulator:
        y = network.call(X)
    return [y, accumulator.jvp(y)]


def accumulator_in_a_function() -> list[Any]:
    network = _Network(compiled=False)

    @tf.function
    def tangent(x: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = network.call(x)
        return y, accumulator.jvp(y)

    return list(tangent(X))


def forward_over_reverse() -> list[Any]:
    """Compute the product of a Hessian and a vector."""
    network = _Network()
    with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as accumulator:
        gradient = _gradient(lambda x: tf.reduce_sum(network.call(x) ** 2), X)
    return [gradient, accumulator.jvp(gradient)]


def reverse_over_forward() -> list[Any]:
    network = _Network(compiled=False)  # TensorFlow itself fails over a function.
    with tf.GradientTape() as tape:
        tape.watch(X)
        with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as accumulator:
            y = network.call(X)
        tangent = accumulator.jvp(y)
    return [tangent, *tape.gradient(tangent, [X, *network.variables])]


def vectorized_map() -> list[Any]:
    network = _Network(compiled=False)

    def gradient(row: Any) -> Any:
        return _gradient(lambda row: tf.reduce_sum(network.call(row[None]) ** 2), row)

    return [
        tf.vectorized_map(gradient, X),
        tf.function(lambda x: tf.vectorized_map(gradient, x))(X),
    ]


def style_transfer() -> list[Any]:
    """Differentiate several values with respect to one tensor."""
    weight = tf.Variable(_numbers(3, 3, 3, 1, 4))

    @tf.function
    def step(image: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(image)
            features = tf.nn.relu(tf.nn.conv2d(image, weight, 1, "SAME"))
            gram = tf.einsum("bijc,bijd->bcd", features, features)
            style = tf.add_n([tf.reduce_mean((gram - 1) ** 2), tf.reduce_mean(features + features)])
            loss = style + tf.reduce_sum(tf.image.total_variation(image))
        gradient = tape.gradient(loss, image)
        return tf.clip_by_value(image - 0.1 * gradient, 0.0, 1.0)

    image = tf.constant(_numbers(4, 1, 5, 5, 1))
    return [step(step(image))]


def second_order_through_control_flow() -> list[Any]:
    weight = tf.Variable(_numbers(5, 6, 6))

    @tf.function
    def rolled(x: Any) -> Any:
        for _ in tf.range(3):
            x = tf.tanh(x @ weight)
        if tf.reduce_sum(x) > 0:
            x = x * 2
        return x

    @tf.function
    def second(x: Any) -> Any:
        return _second_gradients(lambda x: tf.reduce_sum(rolled(x) ** 2), x, weight)

    return list(second(X))


def second_order_of_a_custom_gradient() -> list[Any]:
    @tf.custom_gradient
    def bent(x: Any) -> Any:
        def backward(upstream: Any) -> Any:
            return upstream * tf.sigmoid(x) * x

        return tf.nn.silu(x), backward

    @tf.function
    def call(x: Any) -> Any:
        return tf.reduce_sum(bent(x) ** 2)

    return _second_gradients(call, X)


def tape_around_a_gradient() -> list[Any]:
    """Call a function that contains nothing but the gradient."""
    network = _Network()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = network.call(X)
    return [tf.function(lambda: tape.gradient(y, X))(), tape.gradient(y, X)]


PROGRAMS: dict[str, Callable[[], list[Any]]] = {
    program.__name__.replace("_", " "): program
    for program in (
        gradient_of_a_gradient,
        gradient_penalty,
        gradient_penalty_in_a_step,
        nested_tapes_in_a_function,
        symbolic_gradients,
        third_order,
        jacobian,
        jacobian_of_keras,
        jacobian_in_a_function,
        jacobian_by_a_loop,
        batch_jacobian,
        hessian,
        accumulator_over_a_function,
        accumulator_in_a_function,
        forward_over_reverse,
        reverse_over_forward,
        vectorized_map,
        style_transfer,
        second_order_through_control_flow,
        second_order_of_a_custom_gradient,
        tape_around_a_gradient,
    )
}
