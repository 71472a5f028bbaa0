"""The functions of TensorFlow that this driver replaces, for tests that they are restored."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = [
    "tensorflow.python.distribute.coordinator.cluster_coordinator",
    "tensorflow.python.distribute.mirrored_run",
    "tensorflow.python.eager.context",
    "tensorflow.python.eager.execute",
    "tensorflow.python.eager.backprop",
    "tensorflow.python.eager.imperative_grad",
    "tensorflow.python.eager.record",
    "tensorflow.python.eager.polymorphic_function.atomic_function",
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    "tensorflow.python.framework.ops",
    "tensorflow.python.framework.func_graph",
    "tensorflow.python.ops.gradients_util",
    "tensorflow.python.client.session",
    "tensorflow.python.pywrap_tfe",
    "keras.src.layers.layer",
    "keras.src.ops.operation",
]


def fingerprint() -> dict[str, Any]:
    """Return the identity of all functions in the modules, and their classes, that the driver
    replaces.
    """
    found: dict[str, Any] = {}
    for name in _MODULES:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if isinstance(value, type) and getattr(value, "__module__", None) == name:
                for attribute, member in vars(value).items():
                    if callable(member) or isinstance(
                        member, (property, staticmethod, classmethod)
                    ):
                        found[f"{name}.{key}.{attribute}"] = id(member)
            elif callable(value):
                found[f"{name}.{key}"] = id(value)
    return found
