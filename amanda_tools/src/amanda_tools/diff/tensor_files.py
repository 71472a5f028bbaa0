"""Folders of ``.npy`` and ``.safetensors`` files that other programs wrote, read like a dump.

A table ``names.json`` or ``names.csv`` may give the tensors names and common operator types.
Nothing in a file is executed, and sizes are checked before memory is allocated.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amanda_core.errors import ResultError
from amanda_core.results import tables
from amanda_tools.dump.files import Dumped
from amanda_tools.dump.index import DumpedOp, DumpedTensor, DumpIndex, LeftOut
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.tensors.values import HostTensor

__all__ = [
    "FRAMEWORK",
    "MALFORMED",
    "TABLES",
    "Place",
    "TensorFiles",
    "file_op",
    "has_tensor_files",
    "places_of",
    "read_tensor_files",
]

#: What stands for the framework in the namespace of such tensors.
FRAMEWORK = "files"
#: Names of the tables.
TABLES = ("names.json", "names.csv")
_SUFFIXES = (".npy", ".safetensors")
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
MALFORMED = (EOFError, KeyError, OSError, SyntaxError, TypeError, ValueError, struct.error)


@dataclass(frozen=True)
class Place:
    """Where a tensor is.

    Attributes:
        file: Path of its file in the folder.
        key: Its key in a safetensors file; None for an npy file.
        dtype: Name of its dtype.
        stored: Dtype of NumPy that holds it.
        shape: The shape.
        offset: Its first byte in a safetensors file.
    """

    file: str
    key: str | None
    dtype: str
    stored: str
    shape: list[int]
    offset: int = 0

    def values(self, folder: Path) -> Any:
        """Return the values as an array in C order."""
        import numpy

        path = folder / self.file
        if self.key is None:
            return numpy.array(_npy(path), self.stored, order="C")
        dtype = numpy.dtype(self.stored).newbyteorder("<")
        count = math.prod(self.shape)
        flat = numpy.fromfile(path, dtype, count, offset=self.offset)
        return flat.reshape(self.shape).astype(self.stored, copy=False)


class TensorFiles(Dumped):
    """Tensors of a folder, which can be read like those of a dump.

    Args:
        index: Their names.
        folder: The folder.
        places: Where each tensor of the index is.
    """

    def __init__(self, index: DumpIndex, folder: Path, places: Sequence[Place]) -> None:
        super().__init__(index, folder)
        self._places = {
            id(tensor): place for tensor, place in zip(index.tensors, places, strict=True)
        }

    def read(self, tensor: DumpedTensor) -> HostTensor:
        """Read the values of a tensor.

        Raises:
            ResultError: The file has changed since the folder was read.
        """
        place = self._places[id(tensor)]
        try:
            array = place.values(self.folder)
        except MALFORMED as error:
            raise ResultError(
                f"A tensor cannot be read: {error}"[:300],
                where=str(self.folder / place.file),
                fix="Write the file again, and do not change it during the comparison",
            ) from error
        return HostTensor(array, tensor.dtype)


def has_tensor_files(path: Path) -> bool:
    """Return True if a folder has files of tensors."""
    return path.is_dir() and next(_files(path), None) is not None


def read_tensor_files(folder: Path) -> TensorFiles:
    """Read the names and shapes of the tensors of a folder and of the folders in it.

    Tensors that a table ``names.json`` or ``names.csv`` lists come first, in its order. The others
    follow by file name, with numbers in numeric order. Tensors of one name are executions of one
    operator.

    Raises:
        ResultError: The table of names is malformed.
    """
    named = _table(folder)
    places: list[Place] = []
    left_out = []
    for file in sorted(_files(folder), key=_natural):
        try:
            places += places_of(folder, file)
        except MALFORMED as error:
            left_out.append(LeftOut(str(error)[:200] or type(error).__name__, file, 0, 1))
    found = {place.file for place in places} | {_entry(place) for place in places}
    unread = {one.first for one in left_out}
    left_out += [
        LeftOut("it is in the table of names only", entry, 0, 1)
        for entry in named
        if entry not in found and entry not in unread
    ]
    order = {entry: number for number, entry in enumerate(named)}
    keys = Counter(place.key for place in places)
    rows = [(_entry(place) if _entry(place) in named else place.file, place) for place in places]
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    index = DumpIndex(left_out=left_out)
    numbers: dict[tuple[str, str], int] = {}
    for entry, place in rows:
        stem = place.file.rpartition(".")[0]
        own = stem if place.key is None else place.key
        if place.key is not None and keys[place.key] > 1:
            own = f"{stem}.{place.key}"
        name, word = named.get(entry, (own, ""))
        number = numbers.setdefault((name, word), len(numbers))
        if number == len(index.ops):
            index.ops.append(file_op(name, word))
        op = index.ops[number]
        index.tensors.append(
            DumpedTensor(
                number, 0, op.calls, "output", "0", "", place.dtype, place.shape, place.file
            )
        )
        op.calls += 1
    return TensorFiles(index, folder, [place for _, place in rows])


def file_op(name: str, word: str) -> DumpedOp:
    """Return what stands for an operator in the index, of which only this is known."""
    facts = OpFacts(0, word or "tensor", word or None, name, "", None, f"{FRAMEWORK}//{FRAMEWORK}")
    return DumpedOp(**vars(facts), inputs=[], input_roles=[], layout=None, weight_layout=None)


def _entry(place: Place) -> str:
    return place.file if place.key is None else f"{place.file}:{place.key}"


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of the files in a folder, with slashes."""
    for path in folder.rglob("*"):
        if path.suffix in _SUFFIXES and path.is_file():
            yield path.relative_to(folder).as_posix()


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key by which ``layer2`` comes before ``layer10``.

    >>> sorted(["layer10", "layer2"], key=_natural)
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
        return sorted(_safetensors(folder / file, file), key=lambda one: _natural(one.key or ""))
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


def _table(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the name and the type of each file that a table names."""
    path = next((folder / name for name in TABLES if (folder / name).exists()), None)
    if path is None:
        return {}
    try:
        if path.suffix == ".json":
            rows = tables.load(path)
        else:
            if path.stat().st_size > tables.LIMIT:
                raise ValueError("it is too large")
            rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"))))
        found = {}
        for row in rows:
            values = [row["file"], row["name"], row.get("type") or ""]
            if not all(isinstance(value, str) for value in values):
                raise ValueError(f"{row} has a value that is not a text")
            if values[0] in found:
                raise ValueError(f"{values[0]!r} is in two rows")
            found[values[0]] = values[1], values[2]
    except (AttributeError, csv.Error, KeyError, OSError, TypeError, ValueError) as error:
        missing = f"a row has no {error}" if isinstance(error, KeyError) else str(error)
        raise ResultError(
            f"The table of names cannot be read: {missing}"[:300],
            where=str(path),
            fix="Give each row a file, a name and, if you know it, a common operator type: "
            "columns file,name,type or a list of such objects",
        ) from error
    return found
