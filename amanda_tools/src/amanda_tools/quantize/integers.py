"""Quantized weights as integers and scales, with the configuration that other libraries read.

Owns the names and the configuration, which are those of compressed-tensors' format
``int-quantized``: ``NAME`` holds integers and ``NAME_scale`` the scales of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda_core.errors import ToolError
from amanda_tools.kit.output.folders import write_text
from amanda_tools.kit.tensors.values import HostTensor, numbers
from amanda_tools.kit.weights.baking import BakedModel, write_tensors

__all__ = ["write_integers"]


def write_integers(
    path: Path, model: BakedModel, scales: Mapping[str, Any], bits: int
) -> list[Path]:
    """Write a model's quantized weights as integers, and return the files.

    Args:
        path: The folder.
        model: The model, with the values that the integers stand for.
        scales: Name of a parameter -> its scales, of its rank.
        bits: Width of the integers.

    Raises:
        ToolError: A weight does not have one scale for each row.
    """
    import numpy

    tensors: dict[str, HostTensor] = {}
    for name, tensor in model.tensors.items():
        scale = scales.get(name) if name in model.changed else None
        if scale is None:
            tensors[name] = tensor
            continue
        if scale.shape != (tensor.array.shape[0], *[1] * (tensor.array.ndim - 1)):
            raise ToolError(
                f"{name} does not have one scale for each row, but scales of {scale.shape}",
                fix="Quantize with per='channel', and embeddings not at all; or use save_baked",
            )
        integers = numpy.rint(numbers(tensor.array, tensor.dtype) / scale).astype(numpy.int8)
        tensors[name] = HostTensor(integers, "int8")
        rows = scale.reshape(-1, 1).astype(numpy.float32)
        tensors[f"{name}_scale"] = HostTensor(rows, "float32")
    config = {"quantization_config": _configuration(list(scales), bits)}
    files = [path / "model.safetensors", path / "config.json"]
    write_tensors(files[0], tensors)
    write_text(files[1], json.dumps(config, indent=2) + "\n")
    return files


def _configuration(names: Sequence[str], bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    targets = [name.removesuffix(".weight") for name in names]
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": targets,
                "weights": {**weights, "dynamic": False, "observer": "minmax"},
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": [],
    }
