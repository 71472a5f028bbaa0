"""The namespaces of this driver's contexts: one for each way in which TensorFlow executes."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["EAGER", "FUNCTION", "GRAPH"]

_VERSION = tf.__version__.partition("+")[0]

#: Operators executed one by one.
EAGER = f"tensorflow/{_VERSION}/eager"
#: Nodes of a `tf.function`.
FUNCTION = f"tensorflow/{_VERSION}/function"
#: Nodes of a graph that a `tf.compat.v1.Session` runs.
GRAPH = f"tensorflow/{_VERSION}/graph"
