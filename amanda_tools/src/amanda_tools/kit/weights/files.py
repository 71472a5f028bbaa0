"""Files of values that tools keep by weight: tensors by the parameters' names, others as JSON.

Owns the format. `amanda.WeightState` owns which weight a name refers to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amanda_core.errors import ResultError
from amanda_core.interface.facts import Facts
from amanda_tools.kit.output.extras import need_safetensors
from amanda_tools.kit.output.folders import whole_file, write_text
from amanda_tools.kit.tensors.values import host, need_numpy, numbers

__all__ = ["load_weights", "save_weights"]

FORMAT = "amanda.weights/1"


def save_weights(saved: Mapping[str, Any], path: Path | str, facts: Facts | None = None) -> Path:
    """Write the result of `WeightState.saved` to a file.

    A ``.json`` file holds values that JSON supports, such as numbers, lists and dicts of these. A
    ``.safetensors`` file also holds tensors. Tensors of types that NumPy lacks, such as bfloat16,
    are written as float32, which can represent their values.

    Args:
        saved: The values by name.
        path: The file.
        facts: The driver's facts about tensors, ``context.facts``. NumPy arrays do not need them.

    Raises:
        ResultError: A value cannot be written to such a file.
        NotReadableError: A tensor does not have a plain array of values.
        ImportError: NumPy or safetensors is needed and not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_weights({"Net:conv.weight": 0.5}, f"{folder}/scales.json")
    ...     load_weights(path)
    {'Net:conv.weight': 0.5}
    """
    path, tensors, values = Path(path), {}, {}
    for name, value in saved.items():
        if (facts is not None and facts.is_tensor(value)) or hasattr(value, "__array_interface__"):
            tensors[name] = _array(value, facts)
        else:
            values[name] = value
    try:
        text = json.dumps({"format": FORMAT, "values": values}, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise ResultError(
            f"A value that is kept by weight cannot be written: {error}",
            fix="Keep tensors, or values that JSON has; give the facts of the driver for tensors",
        ) from error
    if path.suffix == ".safetensors":
        with whole_file(path) as new:
            need_safetensors().save_file(tensors, new, metadata={"amanda": text})
    elif tensors:
        raise ResultError(
            f"{path.name} cannot hold tensors, and {next(iter(tensors))} is one",
            fix="Write a .safetensors file",
        )
    else:
        write_text(path, text)
    return path


def load_weights(path: Path | str) -> dict[str, Any]:
    """Return the content of a file by `save_weights`, for `WeightState.load`. Tensors are NumPy
    arrays.

    Raises:
        ResultError: It is not such a file.
        ImportError: NumPy or safetensors is needed and not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_weights(save_weights({"Net:conv.weight": [1, 2]}, f"{folder}/kept.json"))
    {'Net:conv.weight': [1, 2]}
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return _of_safetensors(path)
    try:
        return _values(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read: {error}", fix="Give another file") from error


def _of_safetensors(path: Path) -> dict[str, Any]:
    need_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ResultError(f"{path} cannot be read: {error}", fix="Give another file") from error
    return {**tensors, **_values(metadata.get("amanda", ""), path)}


def _values(text: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ResultError(
            f"{path} is not a file of {FORMAT}", fix="Give one that save_weights wrote"
        )
    values = found.get("values")
    if not isinstance(values, dict):
        raise ResultError(f"{path} has no values", fix="Give one that save_weights wrote")
    return values


def _array(value: Any, facts: Facts | None) -> Any:
    need_numpy()
    import numpy

    if facts is not None and facts.is_tensor(value):
        tensor = host(facts, value)
        value = numbers(tensor.array, tensor.dtype)
    # Not `ascontiguousarray`, which adds an axis to a single number.
    return numpy.asarray(value, order="C")
