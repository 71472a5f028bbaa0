"""The same small program in each installed framework, with the result that NumPy computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FRAMEWORKS", "W", "X", "expected"]

X = np.array([[1.0, -2.0, 0.5], [4.0, 0.25, -8.0]], np.float32)
W = np.array([[1.0, 0.5], [-1.0, 2.0], [0.0, -0.75]], np.float32)


@dataclass(frozen=True)
class Framework:
    """One way to run ``relu(x @ w)``.

    Attributes:
        driver: First part of its namespace.
        run: Runs it once and returns the numbers of the result.
    """

    driver: str
    run: Callable[[], Any]


def expected() -> dict[str, Any]:
    """Return the output of each op, by common type."""
    product = X @ W
    return {"matmul": product, "relu": np.maximum(product, 0)}


def _torch() -> Framework:
    import torch

    def run() -> Any:
        w = torch.tensor(W, requires_grad=True)
        return torch.relu(torch.matmul(torch.tensor(X), w)).detach().numpy()

    return Framework("pytorch", run)


def _tensorflow() -> Framework:
    import tensorflow as tf

    w = tf.Variable(W)
    return Framework("tensorflow", lambda: tf.nn.relu(tf.matmul(tf.constant(X), w)).numpy())


def _tensorflow_function() -> Framework:
    import tensorflow as tf

    w = tf.Variable(W)
    function = tf.function(lambda x: tf.nn.relu(tf.matmul(x, w)))
    return Framework("tensorflow", lambda: function(tf.constant(X)).numpy())


def _tensorflow_graph() -> Framework:
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, X.shape)
        y = tf.nn.relu(tf.matmul(x, tf.constant(W)))
    session = tf.compat.v1.Session(graph=graph)
    return Framework("tensorflow", lambda: session.run(y, {x: X}))


def _tinytape() -> Framework:
    import tinytape

    w = tinytape.parameter(W, "w")
    return Framework("tinytape", lambda: tinytape.relu(tinytape.matmul(tinytape.Tensor(X), w)).data)


_ALL = {
    "torch": ("torch", _torch),
    "tensorflow eager": ("tensorflow", _tensorflow),
    "tensorflow function": ("tensorflow", _tensorflow_function),
    "tensorflow graph": ("tensorflow", _tensorflow_graph),
    "tinytape": ("tinytape", _tinytape),
}
#: Name -> factory, for the frameworks that are installed.
FRAMEWORKS = {
    name: make for name, (module, make) in _ALL.items() if importlib.util.find_spec(module)
}
