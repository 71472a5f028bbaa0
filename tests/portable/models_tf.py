"""The network of `models` in TensorFlow's modes: eager, functions, sessions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from .models import IMAGES, LABELS, RATE, WEIGHTS, Effect, Record
from .tools import Array

__all__ = [
    "EagerProgram",
    "FunctionProgram",
    "ReferenceSessionProgram",
    "SessionProgram",
    "StepFunctionProgram",
]

v1 = tf.compat.v1

#: OIHW -> HWIO, OI -> IO.
_TO_TENSORFLOW = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
#: One zero at each border; "SAME" would add two at the far border of a stride of 2.
_PADDING = [[0, 0], [1, 1], [1, 1], [0, 0]]


def to_tensorflow(array: Array) -> Array:
    """Convert a weight to TensorFlow's layout."""
    return np.ascontiguousarray(array.transpose(_TO_TENSORFLOW[array.ndim]))


def from_tensorflow(array: Array) -> Array:
    """Convert a weight from TensorFlow's layout."""
    return array.transpose(np.argsort(_TO_TENSORFLOW[array.ndim]))


def _nhwc(images: Array) -> Array:
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1))


_BATCHES = [(_nhwc(images), labels) for images, labels in zip(IMAGES, LABELS, strict=True)]


def _masked(weight: Any, mask: Array, mask_gradient: bool) -> Any:
    def masked(weight: Any) -> Any:
        return weight * mask, lambda g: g * mask if mask_gradient else g

    return tf.custom_gradient(masked)(tf.convert_to_tensor(weight))


def _scaled_gradient(x: Any, factor: float) -> Any:
    def scaled(x: Any) -> Any:
        return tf.identity(x), lambda g: g * factor

    return tf.custom_gradient(scaled)(x)


def _swish(x: Any) -> Any:
    return x / (1.0 + math.e ** (-x))


class _Network:
    """The network, given its weights."""

    def __init__(self, effect: Effect) -> None:
        self.effect = effect
        self.record = Record()
        self.weights: dict[str, Any] = {}

    def build(self) -> None:
        """Make the variables."""
        self.weights = {n: tf.Variable(to_tensorflow(w), name=n) for n, w in WEIGHTS.items()}

    def weight(self, name: str) -> Any:
        """Return a weight, masked if the program says so."""
        masks = self.effect.masks
        if masks is None or name not in masks:
            return self.weights[name]
        mask = to_tensorflow(masks[name])
        return _masked(self.weights[name], mask, self.effect.mask_gradients)

    def scaled(self, x: Any) -> Any:
        """Return `x` with its gradient scaled if the program says so."""
        factor = self.effect.relu_gradient
        return x if factor is None else _scaled_gradient(x, factor)

    def loss_of(self, images: Any, labels: Any) -> tuple[Any, Any]:
        """Return loss and logits. Each call of an operator has its own line, which
        identifies it.
        """
        w, relu = self.weight, _swish if self.effect.swish else tf.nn.relu
        x = tf.nn.conv2d(images, w("conv1.weight"), 1, _PADDING)
        x = tf.nn.bias_add(x, w("conv1.bias"))
        x = self.scaled(relu(x))
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        x = tf.nn.conv2d(x, w("conv2.weight"), 2, _PADDING)
        x = tf.nn.bias_add(x, w("conv2.bias"))
        x = self.scaled(relu(x))
        # The dense weights are those of a flattened NCHW.
        x = tf.transpose(x, [0, 3, 1, 2])
        x = tf.reshape(x, [4, 32])
        x = tf.nn.bias_add(tf.matmul(x, w("dense1.weight")), w("dense1.bias"))
        x = self.scaled(relu(x))
        logits = tf.nn.bias_add(tf.matmul(x, w("dense2.weight")), w("dense2.bias"))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(losses), logits

    def note(self, loss: Any, logits: Any, gradients: Any) -> None:
        """Record a step."""
        self.record.losses.append(float(loss))
        self.record.logits.append(np.asarray(logits))
        self.record.gradients.append(
            {
                n: from_tensorflow(np.asarray(g))
                for n, g in zip(self.weights, gradients, strict=True)
            }
        )

    def finish(self) -> None:
        """Record the weights."""
        self.record.weights = {n: from_tensorflow(w.numpy()) for n, w in self.weights.items()}


class EagerProgram(_Network):
    """Runs operator by operator."""

    def forward(self, images: Any, labels: Any) -> Any:
        """Return loss and logits."""
        return self.loss_of(images, labels)

    def step(self, number: int) -> None:
        """Perform one step of gradient descent and record it."""
        images, labels = map(tf.constant, _BATCHES[number])
        with tf.GradientTape() as tape:
            loss, logits = self.forward(images, labels)
        gradients = tape.gradient(loss, list(self.weights.values()))
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.assign_sub(RATE * gradient)
        self.note(loss, logits, gradients)


class FunctionProgram(EagerProgram):
    """Runs the forward program as a function, with the tape outside."""

    def build(self) -> None:
        """Make the variables and trace the function."""
        super().build()
        self.function = tf.function(self.loss_of)
        self.function.get_concrete_function(*map(tf.constant, _BATCHES[0]))

    def forward(self, images: Any, labels: Any) -> Any:
        """Return loss and logits."""
        return self.function(images, labels)


class StepFunctionProgram(_Network):
    """Runs the whole step as a function, with its tape and updates inside."""

    def build(self) -> None:
        """Make the variables and trace the function."""
        super().build()
        self.function = tf.function(self.train)
        self.function.get_concrete_function(*map(tf.constant, _BATCHES[0]))

    def train(self, images: Any, labels: Any) -> Any:
        """Perform one step."""
        with tf.GradientTape() as tape:
            loss, logits = self.loss_of(images, labels)
        gradients = tape.gradient(loss, list(self.weights.values()))
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.assign_sub(RATE * gradient)
        return loss, logits, gradients

    def step(self, number: int) -> None:
        """Perform one step of gradient descent and record it."""
        self.note(*self.function(*map(tf.constant, _BATCHES[number])))


class SessionProgram(_Network):
    """Runs a graph in a session, with resource variables."""

    resource = True

    def build(self) -> None:
        """Build the graph and initialise the variables."""
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.weights = {
                name: v1.get_variable(
                    name.replace(".", "_"),
                    initializer=to_tensorflow(weight),
                    use_resource=self.resource,
                )
                for name, weight in WEIGHTS.items()
            }
            self.images = v1.placeholder(tf.float32, [4, 8, 8, 3])
            self.labels = v1.placeholder(tf.int64, [4])
            loss, logits = self.loss_of(self.images, self.labels)
            variables = list(self.weights.values())
            gradients = v1.gradients(loss, variables)
            # Reference variables are read where they stand: nothing may still want the old values.
            with tf.control_dependencies([loss, logits, *gradients]):
                updates = [
                    v1.assign_sub(weight, RATE * gradient)
                    for weight, gradient in zip(variables, gradients, strict=True)
                ]
                self.update = tf.group(*updates)
            self.fetches = [loss, logits, gradients, self.update]
            self.session = v1.Session(graph=self.graph)
            self.session.run(v1.global_variables_initializer())

    def step(self, number: int) -> None:
        """Perform one step of gradient descent and record it."""
        images, labels = _BATCHES[number]
        feeds = {self.images: images, self.labels: labels}
        loss, logits, gradients, _ = self.session.run(self.fetches, feeds)
        self.note(loss, logits, gradients)

    def finish(self) -> None:
        """Record the weights and close the session."""
        values = self.session.run(list(self.weights.values()))
        self.record.weights = {
            n: from_tensorflow(w) for n, w in zip(self.weights, values, strict=True)
        }
        self.session.close()


class ReferenceSessionProgram(SessionProgram):
    """Runs a graph in a session, with reference variables."""

    resource = False
