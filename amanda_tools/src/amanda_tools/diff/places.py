"""Where the tensors are in files of ``.npy``, ``.npz``, ``.safetensors`` and ``torch.save``.

Nothing in a file is executed, and sizes are checked before memory is allocated.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from amanda_tools.diff.torch_files import stored_tensors

__all__ = ["MALFORMED", "SUFFIXES", "Place", "natural", "places_of"]

#: Suffixes of the files that can be read.
SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")
#: Largest header of a safetensors file, in bytes, as in its own library.
_HEADER = 100_000_000
#: Dtypes of NumPy that can be compared.
_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
#: Dtype of safetensors -> its name, and the dtype of NumPy that holds it.
_SAFETENSORS = {
    "BOOL": ("bool", "bool"),
    **{f"I{bits}": (f"int{bits}", f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": (f"float{bits}", f"float{bits}") for bits in (16, 32, 64)},
    "C64": ("complex64", "complex64"),
    "BF16": ("bfloat16", "uint16"),
    "F8_E4M3": ("float8_e4m3fn", "uint8"),
    "F8_E5M2": ("float8_e5m2", "uint8"),
}
#: Errors of reading a file that is malformed.
MALFORMED = (
    *(AttributeError, EOFError, KeyError, OSError, OverflowError, RecursionError, SyntaxError),
    *(TypeError, ValueError, NotImplementedError, struct.error, zipfile.error, zlib.error),
)


@dataclass(frozen=True)
class Place:
    """Where a tensor is.

    Attributes:
        file: Path of its file in the folder.
        key: Its key in a file of several tensors; None for an npy file.
        dtype: Name of its dtype.
        stored: Dtype of NumPy that holds it.
        shape: The shape.
        offset: Its first byte in a file that has its elements as they are.
        strides: Distances of its elements along each axis; None for C order.
    """

    file: str
    key: str | None
    dtype: str
    stored: str
    shape: list[int]
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def values(self, folder: Path) -> Any:
        """Return the values as an array in C order."""
        import numpy

        path = folder / self.file
        if self.key is None:
            return numpy.array(_npy(path), self.stored, order="C")
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive, archive.open(f"{self.key}.npy") as member:
                array = numpy.lib.format.read_array(member, allow_pickle=False)
            return numpy.array(array, self.stored, order="C")
        dtype = numpy.dtype(self.stored).newbyteorder("<")
        strides = self.strides
        count = math.prod(self.shape)
        if strides is not None and count:
            count = 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))
        flat = numpy.fromfile(path, dtype, count, offset=self.offset)
        if strides is None or not count:
            return flat.reshape(self.shape).astype(self.stored, copy=False)
        if flat.size < count:
            raise ValueError("it is truncated")
        steps = [dtype.itemsize * one for one in strides]
        viewed = numpy.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)
        return numpy.array(viewed, self.stored, order="C")


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key by which ``layer2`` comes before ``layer10``.

    >>> sorted(["layer10", "layer2"], key=natural)
    ['layer2', 'layer10']
    """
    parts = re.split(r"([0-9]+)", text)
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in parts]


def places_of(folder: Path, file: str) -> list[Place]:
    """Return the tensors of a file.

    Raises:
        ValueError: It cannot be read; or another of `MALFORMED`.
    """
    if file.endswith(".safetensors"):
        return sorted(_safetensors(folder / file, file), key=lambda one: natural(one.key or ""))
    if file.endswith(".npz"):
        return list(_npz(folder / file, file))
    if not file.endswith(".npy"):
        return [
            Place(file, one.key, one.dtype, one.stored, one.shape, one.offset, one.strides)
            for one in stored_tensors(folder / file)
        ]
    array = _npy(folder / file)
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"dtype {array.dtype} cannot be compared")
    return [Place(file, None, array.dtype.name, array.dtype.name, list(array.shape))]


def _npy(path: Path) -> Any:
    import numpy

    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("it is not an npy file")
    try:
        return numpy.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        # An array without elements cannot be mapped, and takes no memory.
        array = numpy.load(path, allow_pickle=False) if path.stat().st_size < 1 << 16 else None
        if array is None or array.size:
            raise
        return array


def _npz(path: Path, file: str) -> Iterator[Place]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                raise ValueError(f"{info.filename[:60]!r} in it is not an array")
            with archive.open(info) as member:
                shape, dtype = _header(member)
                size = math.prod(shape) * dtype.itemsize
                if dtype.name not in _DTYPES:
                    raise ValueError(f"dtype {dtype} cannot be compared")
                if size != info.file_size - member.tell():
                    raise ValueError(f"{info.filename[:60]!r} in it is truncated")
            key = info.filename.removesuffix(".npy")
            yield Place(file, key, dtype.name, dtype.name, list(shape))


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], Any]:
    """Return the shape and the dtype that an array in an archive has."""
    from numpy.lib import format as npy

    version = npy.read_magic(member)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of its format is not known")
    shape, _, dtype = readers[version](member)
    return shape, dtype


def _safetensors(path: Path, file: str) -> Iterator[Place]:
    import numpy

    size = path.stat().st_size
    with path.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > min(_HEADER, size - 8):
            raise ValueError("its header is truncated")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        if entry["dtype"] not in _SAFETENSORS:
            raise ValueError(f"dtype {entry['dtype']} of {key!r} cannot be compared")
        dtype, stored = _SAFETENSORS[entry["dtype"]]
        first, last = entry["data_offsets"]
        shape = [int(one) for one in entry["shape"]]
        width = numpy.dtype(stored).itemsize
        fits = 0 <= first <= last <= size - 8 - length
        if not fits or min(shape, default=0) < 0 or math.prod(shape) * width != last - first:
            raise ValueError(f"{key!r} is truncated, or its shape does not fit")
        yield Place(file, key, dtype, stored, shape, 8 + length + first)
