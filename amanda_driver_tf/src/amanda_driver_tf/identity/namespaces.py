"""The namespaces of this driver's contexts: one for each way in which TensorFlow executes."""

from __future__ import annotations

from amanda_driver_tf.tensorflow_internals.objects import RELEASE

__all__ = ["EAGER", "FUNCTION", "GRAPH"]

#: Operators executed one by one.
EAGER = f"tensorflow/{RELEASE}/eager"
#: Nodes of a `tf.function`.
FUNCTION = f"tensorflow/{RELEASE}/function"
#: Nodes of a graph that a `tf.compat.v1.Session` runs.
GRAPH = f"tensorflow/{RELEASE}/graph"
