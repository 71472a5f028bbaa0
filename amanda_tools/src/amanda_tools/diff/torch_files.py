"""Files of ``torch.save``, whose tensors are found without PyTorch.

Such a file is an archive with a pickle that says which tensors there are. Only the few things that
make a tensor are accepted there, nothing else is imported or called, and instructions that could
take more memory than the file are refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["StoredTensor", "stored_tensors"]

#: Largest pickle in such a file, in bytes; it has no elements of tensors.
_PICKLE = 1 << 24
#: How many values it may have, as one list may be in it many times.
_VALUES = 1 << 20
#: Tensors with fewer bytes than this may be larger than their file, as expanded ones are.
_EXPANDED = 1 << 28
#: Name of a storage's class -> name of the dtype, and the dtype of NumPy that holds it.
_STORAGES = {
    "BoolStorage": ("bool", "bool"),
    "ByteStorage": ("uint8", "uint8"),
    "CharStorage": ("int8", "int8"),
    "ShortStorage": ("int16", "int16"),
    "IntStorage": ("int32", "int32"),
    "LongStorage": ("int64", "int64"),
    "HalfStorage": ("float16", "float16"),
    "BFloat16Storage": ("bfloat16", "uint16"),
    "FloatStorage": ("float32", "float32"),
    "DoubleStorage": ("float64", "float64"),
    "ComplexFloatStorage": ("complex64", "complex64"),
    "ComplexDoubleStorage": ("complex128", "complex128"),
}
#: Dtypes that have no storage of their own, likewise.
_DTYPES = {
    **{name: (name, name) for name in ("uint16", "uint32", "uint64")},
    **{name: (name, "uint8") for name in ("float8_e4m3fn", "float8_e5m2")},
}
#: Instructions of pickles that take memory by a number in them, or make objects of any class.
_REFUSED = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"}
_REFUSED |= {"EXT1", "EXT2", "EXT4", "PERSID"}


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        key: Where it is in what was saved, such as ``layers.0``; empty if that is the tensor.
        dtype: Name of its dtype.
        stored: Dtype of NumPy that holds it.
        shape: The shape.
        offset: Its first byte in the file.
        strides: Distances of its elements along each axis.
    """

    key: str
    dtype: str
    stored: str
    shape: list[int]
    offset: int
    strides: tuple[int, ...]


class _Storage(NamedTuple):
    dtype: tuple[str, str] | None
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: tuple[str, str] | None


class _Mapping(dict[Any, Any]):
    """Stands for an ordered dictionary, which may have attributes."""

    def __init__(self) -> None:
        super().__init__()


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors in a file of ``torch.save``, in the order of what was saved.

    Raises:
        ValueError: It cannot be read; or another error of a malformed archive or pickle.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "it is not an archive, but truncated or in the format of torch.save before 1.6"
        )
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in members:
            raise ValueError("it is not a file of torch.save")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")
        if members["data.pkl"].file_size > _PICKLE:
            raise ValueError("its pickle is too large")
        saved = _unpickled(archive.read(members["data.pkl"]))
        found = []
        for key, tensor in _tensors(saved, "", [_VALUES]):
            member = members[f"data/{tensor.storage.key}"]
            begin, size = _extent(file, member)
            found.append(_placed(key, tensor, begin, size, path.stat().st_size))
    return found


def _unpickled(content: bytes) -> Any:
    try:
        for opcode, argument, _ in pickletools.genops(content):
            memo = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0)
            if opcode.name in _REFUSED or memo > len(content):
                raise ValueError(f"its pickle has the instruction {opcode.name}")
        return _Unpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, IndexError, MemoryError) as error:
        raise ValueError(f"its pickle is malformed: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = {
            ("torch.storage", "UntypedStorage"): None,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch", "Size"): tuple,
            ("collections", "OrderedDict"): _Mapping,
        }
        if (module, name) not in known:
            raise ValueError(f"it has an object of {module}.{name}, which is not read")
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(key, str):
            raise ValueError("it refers to something that is not a storage")
        return _Storage(dtype, key)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, strides, storage.dtype)


def _tensor_of_dtype(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    *_: Any,
) -> _Tensor:
    return _Tensor(storage, offset, shape, strides, dtype)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _tensors(value: Any, key: str, left: list[int]) -> Iterator[tuple[str, _Tensor]]:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("it has too many values")
    if isinstance(value, _Tensor):
        yield key, value
    elif isinstance(value, (dict, list, tuple)):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(one, f"{key}.{name}" if key else str(name), left)


def _extent(file: Any, member: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the first byte of a member of an archive, and its size."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its tensors are compressed")
    file.seek(member.header_offset)
    # The name and what follows it may be longer here than in the directory.
    name, extra = struct.unpack("<26xHH", file.read(30))
    return member.header_offset + 30 + name + extra, member.file_size


def _placed(key: str, tensor: _Tensor, begin: int, size: int, whole: int) -> StoredTensor:
    import numpy

    if tensor.dtype is None:
        raise ValueError(f"the dtype of {key!r} is not known")
    dtype, stored = tensor.dtype
    numbers = tensor.offset, *tensor.shape, *tensor.strides
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"the shape of {key!r} is malformed")
    width = numpy.dtype(stored).itemsize
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    count = math.prod(tensor.shape)
    if count and (
        (tensor.offset + last + 1) * width > size
        or begin + size > whole
        or count * width > max(whole, _EXPANDED)
    ):
        raise ValueError(f"{key!r} is truncated, or its shape does not fit")
    offset = begin + tensor.offset * width
    return StoredTensor(key, dtype, stored, list(tensor.shape), offset, tuple(tensor.strides))
