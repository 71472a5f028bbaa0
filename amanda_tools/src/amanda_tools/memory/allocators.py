"""What the allocators of frameworks report of devices, where buffers of graphs are not visible."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["allocator_memory"]


def allocator_memory(frameworks: Collection[str]) -> dict[str, dict[str, int]]:
    """Return ``current`` and ``peak`` bytes by device, since the program began.

    Only TensorFlow's GPUs: it keeps no such account of the CPU, and PyTorch's buffers are visible.

    Args:
        frameworks: Names of the frameworks whose operators ran.
    """
    if "tensorflow" not in frameworks:
        return {}
    import tensorflow as tf

    found = {}
    for number, _ in enumerate(tf.config.list_logical_devices("GPU")):
        memory = tf.config.experimental.get_memory_info(f"GPU:{number}")
        found[f"GPU:{number}"] = {"current": memory["current"], "peak": memory["peak"]}
    return found
