"""Quantized weights as integers and scales, with the configuration that other libraries read.

Owns the names and the configuration, which are those of compressed-tensors: ``int-quantized`` for 8
bits, and ``pack-quantized`` for fewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from amanda_core.errors import ToolError
from amanda_core.weights.reads import Weight
from amanda_tools.kit.output.folders import create_folder, write_text
from amanda_tools.kit.tensors.values import HostTensor, numbers
from amanda_tools.kit.weights.baking import BakedModel, write_tensors
from amanda_tools.quantize.formats import Grid

__all__ = ["has_integers", "write_integers"]

#: The grid of a parameter, of its rank, and the width of its integers.
Grids = tuple[Grid, int]


class _Kind(NamedTuple):
    """What the weights of one group of the configuration have in common."""

    strategy: str
    bits: int
    group: int
    has_zeros: bool

    @property
    def format(self) -> str:
        return "int-quantized" if self.bits == 8 else "pack-quantized"


def has_integers(weight: Weight, grid: Grid, bits: int) -> bool:
    """Return True for a weight that the formats have: a matrix of a linear layer or an embedding,
    with a scale for each row, for each of its groups, or one for all.

    Embeddings have 8 bits: transformers does not load those that are packed.
    """
    shape = grid.scale.shape
    fits = len(weight.shape) == 2 and (shape == (1, 1) or shape[0] == weight.shape[0])
    has_rows = weight.letters == "OI" or (weight.letters == ".." and (bits, shape[1:]) == (8, (1,)))
    return fits and has_rows and weight.name.endswith(".weight")


def write_integers(path: Path, model: BakedModel, grids: Mapping[str, Grids]) -> list[Path]:
    """Write a model's quantized weights as integers, and return the files, unless another process
    does.

    Those that the formats do not have, such as weights of convolutions, are written as the numbers
    that their integers stand for.

    Args:
        path: The folder, which is made.
        model: The model, with the values that the integers stand for.
        grids: Name of a parameter -> its grid and bits, for those that have integers.

    Raises:
        ToolError: Scales are not those of the values.
    """
    tensors: dict[str, HostTensor] = {}
    kinds: dict[_Kind, list[str]] = {}
    for name, tensor in model.tensors.items():
        grid, bits = grids.get(name, (None, 0))
        if grid is None:
            tensors[name] = tensor
            continue
        (rows, groups), has_zeros = grid.scale.shape, grid.lowest == 0
        strategy = "group" if groups > 1 else "channel" if rows > 1 else "tensor"
        group = tensor.array.shape[1] // groups if groups > 1 else 0
        kind = _Kind(strategy, bits, group, has_zeros)
        module = name.removesuffix(".weight")
        kinds.setdefault(kind, []).append(module)
        tensors.update(_of_module(module, tensor, grid, kind))
    if not model.is_written:
        return []
    config = {"quantization_config": _configuration(kinds)}
    path = create_folder(path)
    files = [path / "model.safetensors", path / "config.json"]
    write_tensors(files[0], tensors)
    write_text(files[1], json.dumps(config, indent=2) + "\n")
    return files


def _of_module(
    module: str, tensor: HostTensor, grid: Grid, kind: _Kind
) -> Iterable[tuple[str, HostTensor]]:
    """Return the tensors of a module by their names."""
    import numpy

    values = numbers(tensor.array, tensor.dtype)
    wide = "float64" if tensor.dtype == "float64" else "float32"
    scale = grid.scale.astype(wide)
    each, zero = (
        one.repeat(kind.group, 1) if kind.group else one
        for one in (scale, grid.zero.astype(numpy.int16))
    )
    integers = numpy.rint(values / each).astype(numpy.int16)
    # A dtype of fewer digits has rounded the product.
    digits = 0.0 if tensor.dtype == wide else 2.0**-8
    if not numpy.allclose(integers * each, values, rtol=digits, atol=0.0):
        raise ToolError(
            f"{module}.weight has changed since its scales were made",
            fix="Run the model under a new tool, and save then",
        )
    flat = scale.shape if kind.strategy != "tensor" else (-1,)
    yield f"{module}.weight_scale", HostTensor(scale.reshape(flat), wide)
    # Files have signed numbers.
    first = 2 ** (kind.bits - 1) if kind.has_zeros else 0
    integers = (integers + zero - first).astype(numpy.int8)
    if kind.has_zeros:
        zeros = (grid.zero.astype(numpy.int16) - first).astype(numpy.int8).reshape(flat)
        packs = kind.format == "pack-quantized" and kind.strategy != "tensor"
        yield (
            f"{module}.weight_zero_point",
            HostTensor(numpy.ascontiguousarray(_packed(zeros.T, kind.bits).T), "int32")
            if packs
            else HostTensor(zeros, "int8"),
        )
    if kind.format == "int-quantized":
        yield f"{module}.weight", HostTensor(integers, "int8")
        return
    yield f"{module}.weight_packed", HostTensor(_packed(integers, kind.bits), "int32")
    yield f"{module}.weight_shape", HostTensor(numpy.asarray(values.shape, numpy.int64), "int64")


def _packed(integers: Any, bits: int) -> Any:
    """Return rows of integers, one after the other from the lowest bit on, as rows of int32.

    >>> import numpy
    >>> _packed(numpy.asarray([[-8, -7, 7]], numpy.int8), 4).tolist()
    [[3856]]
    """
    import numpy

    unsigned = (integers.astype(numpy.int16) + 2 ** (bits - 1)).astype(numpy.uint8)
    rows = (unsigned[..., None] >> numpy.arange(bits, dtype=numpy.uint8) & 1).reshape(
        len(integers), -1
    )
    rows = numpy.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return numpy.packbits(rows, axis=1, bitorder="little").view("<i4")


def _configuration(kinds: Mapping[_Kind, list[str]]) -> dict[str, Any]:
    formats = {kind.format for kind in kinds}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {
                "targets": modules,
                "format": kind.format,
                "weights": {
                    "num_bits": kind.bits,
                    "type": "int",
                    "symmetric": not kind.has_zeros,
                    "strategy": kind.strategy,
                    "group_size": kind.group or None,
                    "dynamic": False,
                    "observer": "minmax",
                },
                "input_activations": None,
                "output_activations": None,
            }
            for number, (kind, modules) in enumerate(kinds.items())
        },
        "ignore": [],
    }
