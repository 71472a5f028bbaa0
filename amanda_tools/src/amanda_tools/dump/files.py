"""Files of a dump: written many tensors at a time, read one by one.

Defines the names of files and keys, the two formats and the limits. The name that a program gives
an operator never becomes the name of a file.
"""

from __future__ import annotations

import errno
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from amanda_core.errors import ResultError
from amanda_core.results import printable
from amanda_core.results.folder_lock import FolderLock
from amanda_core.results.output import LOCK
from amanda_core.results.records import record_beside
from amanda_tools.dump.index import INDEX, DumpedTensor, DumpIndex, LeftOut, read_index
from amanda_tools.kit.output.extras import need_safetensors
from amanda_tools.kit.output.folders import create_folder, whole_file
from amanda_tools.kit.output.rendering import format_count
from amanda_tools.kit.tensors.values import HostTensor

__all__ = [
    "Dumped",
    "Form",
    "Writer",
    "key_of_tensor",
    "load_dump",
    "problems_of",
    "reserve",
]

Form = Literal["npz", "safetensors"]
#: Beginning of the reason of tensors that could not be written.
_LOST = "could not be written"
#: Number of bytes of tensors after which a file is written.
_PART = 1 << 26
#: Names of files of tensors.
_FILE = re.compile(r"\d{5,}\.(npz|safetensors)")
#: Exceptions that zipfile, zlib, struct and numpy raise for arbitrary bytes.
_MALFORMED = (
    ArithmeticError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.error,
    zlib.error,
)


def key_of_tensor(tensor: DumpedTensor, name: str) -> str:
    """Return a unique key for a tensor in its file, with characters that every system accepts.

    >>> tensor = DumpedTensor(3, 0, 1, "output", "0", "", "float32", [2])
    >>> key_of_tensor(tensor, "../a b")
    'a_b.3.1.output.0'
    """
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-")[:80] or "op"
    return f"{readable}.{tensor.op}.{tensor.execution}.{tensor.what}.{tensor.position}"


def reserve(folder: Path, index: str) -> FolderLock:
    """Keep other tools out of a folder that has no files yet; create it if necessary.

    Args:
        folder: The folder.
        index: Name of the index.

    Returns:
        The lock, to be released when all files are written.

    Raises:
        ValueError: It has files already, or another tool writes to it.
    """
    create_folder(folder)
    lock = FolderLock(folder / LOCK)
    free = lock.acquire()
    if any(p.name == index or _FILE.fullmatch(p.name) for p in folder.iterdir()):
        lock.release()
        raise ValueError(f"folder must have no dump yet, but {str(folder)!r} has one")
    if not free:
        raise ValueError(f"folder must not be in use, but another run writes to {str(folder)!r}")
    return lock


def problems_of(left_out: Iterable[LeftOut]) -> list[str]:
    """Describe what could not be written."""
    lost = (left for left in left_out if left.reason.startswith(_LOST))
    return [f"{format_count(left.tensors, 'tensor')} {left.reason}" for left in lost]


class Writer:
    """Writes tensors into the files of a folder, some megabytes in each.

    Args:
        folder: The folder.
        form: Format of the files.
        files: Maximum number of files.
        part: Bytes of tensors that are held before a file is written; 64 MiB if left out.
    """

    def __init__(self, folder: Path, form: Form, files: int, part: int | None = None) -> None:
        self.folder = folder
        self.form = form
        self.files = files
        self.part = part or _PART
        #: Names of the files written so far.
        self.written: list[str] = []
        #: Tensors that could not be written; None if all were.
        self.lost: LeftOut | None = None
        self._arrays: dict[str, Any] = {}
        self._bytes = 0
        #: Entries of the tensors that are in memory, with the names of their operators.
        self._waiting: list[tuple[DumpedTensor, str]] = []
        #: A fork has what is in memory, too, and must not write it.
        self._process = os.getpid()

    @property
    def is_own(self) -> bool:
        """Return False in a fork of the process whose files these are."""
        return os.getpid() == self._process

    @property
    def is_full(self) -> bool:
        """Return True if the maximum number of files is reached."""
        return len(self.written) >= self.files

    def add(self, tensor: DumpedTensor, values: HostTensor, name: str) -> None:
        """Write a tensor now or with the next file, and record the place in `tensor`.

        If a file cannot be written, the tensors that it would hold and all later ones have no
        place, and `lost` counts them. The program that is instrumented goes on.

        Args:
            tensor: Entry of the tensor in the index.
            values: The values.
            name: Name of the operator.
        """
        array = values.array
        if self.lost is not None:
            self._lose(tensor, name, int(array.nbytes), self.lost.reason)
            return
        if self.form == "safetensors" and array.dtype.name == "complex128":
            array = array.reshape(*array.shape, 1).view("float64")
        tensor.key = key_of_tensor(tensor, f"{tensor.step}.{name}")
        tensor.file = f"{len(self.written):05d}.{self.form}"
        tensor.stored = array.dtype.name
        self._arrays[tensor.key] = array
        self._waiting.append((tensor, name))
        self._bytes += array.nbytes
        if self._bytes >= self.part:
            self.flush()

    def flush(self) -> None:
        """Write the tensors that are still in memory."""
        if not self._arrays:
            return
        name = f"{len(self.written):05d}.{self.form}"
        try:
            self._write(self.folder / name)
        except OSError as error:
            for tensor, op in self._waiting:
                size = int(self._arrays[str(tensor.key)].nbytes)
                self._lose(tensor, op, size, f"{_LOST}: {error.strerror or error}")
        else:
            self.written.append(name)
        self._arrays, self._bytes, self._waiting = {}, 0, []

    def _write(self, path: Path) -> None:
        if not self.is_own:
            raise PermissionError(errno.EPERM, "this process is a fork of the one that writes them")
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, f"{path.name} is there already")
        with whole_file(path) as new, new.open("wb") as file:
            if self.form == "npz":
                import numpy

                numpy.savez(file, **self._arrays)
            else:
                file.write(need_safetensors().save(self._arrays))

    def _lose(self, tensor: DumpedTensor, op: str, size: int, reason: str) -> None:
        tensor.file = tensor.key = tensor.stored = None
        if self.lost is None:
            self.lost = LeftOut(reason, op, tensor.step)
        self.lost.tensors += 1
        self.lost.bytes += size


class Dumped:
    """A dump that can be read.

    Args:
        index: The index.
        folder: Folder of the files.
        owner: Object to keep alive while the files are needed, if they are deleted with it.

    Attributes:
        index: The index.
        folder: Folder of the files.
    """

    def __init__(self, index: DumpIndex, folder: Path, owner: object = None) -> None:
        self.index = index
        self.folder = folder
        self._owner = owner
        self._archive: zipfile.ZipFile | None = None

    def read(self, tensor: DumpedTensor) -> HostTensor:
        """Read the values of a tensor.

        Raises:
            ResultError: The values are not in the dump, or do not match the index.
            ImportError: The dump needs safetensors, which is not installed.
        """
        if tensor.file is None or tensor.key is None:
            raise self._error(tensor, "only its figures are in the dump")
        path = self.folder / tensor.file
        if path.is_symlink() or not path.is_file():
            raise self._error(tensor, f"{tensor.file} is not a file")
        shape = tensor.shape
        if tensor.dtype == "complex128" and tensor.stored == "float64":
            shape = [*shape, 2]
        if path.suffix == ".npz":
            array = self._of_npz(path, tensor, shape)
        else:
            array = self._of_safetensors(path, tensor, shape)
        if shape is not tensor.shape:
            array = array.view("complex128").reshape(tensor.shape)
        return HostTensor(array, tensor.dtype)

    def _of_npz(self, path: Path, tensor: DumpedTensor, shape: list[int]) -> Any:
        import numpy

        try:
            # Keep the archive open: tensors are usually read in the order of the files.
            if self._archive is None or self._archive.filename != str(path):
                self._archive = zipfile.ZipFile(path)
            with self._archive.open(f"{tensor.key}.npy") as member:
                # Check the size before memory is allocated; nothing is compressed.
                version = numpy.lib.format.read_magic(member)
                if version != (1, 0):
                    raise ValueError(f"version {version} of its format is not known")
                found, by_columns, dtype = numpy.lib.format.read_array_header_1_0(member)
                size = math.prod(found) * dtype.itemsize
                if size > path.stat().st_size or dtype.kind not in "biufc":
                    raise ValueError("its values are truncated or are not numbers")
                content = member.read(size)
            array: Any = numpy.ndarray(found, dtype, content, order="F" if by_columns else "C")
        except _MALFORMED as error:
            raise self._error(tensor, str(error) or type(error).__name__) from error
        self._check(tensor, shape, array)
        return array

    def _of_safetensors(self, path: Path, tensor: DumpedTensor, shape: list[int]) -> Any:
        need_safetensors()
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                array = file.get_tensor(tensor.key)
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise self._error(tensor, str(error)) from error
        self._check(tensor, shape, array)
        return array

    def _check(self, tensor: DumpedTensor, shape: list[int], array: Any) -> None:
        if list(array.shape) != shape or array.dtype.name != tensor.stored:
            raise self._error(
                tensor,
                f"it is {array.dtype.name}{list(array.shape)}, but the index says "
                f"{tensor.stored}{shape}",
            )

    def _error(self, tensor: DumpedTensor, reason: str) -> ResultError:
        return ResultError(
            f"The tensor {printable(str(tensor.key))[:120]!r} cannot be read: {reason[:200]}",
            where=str(self.folder),
            fix="Write the dump again",
        )


def load_dump(path: Path) -> Dumped:
    """Read a dump.

    Args:
        path: Folder of the dump, its index, the file that `amanda run` wrote next to its folder, or
            the folder of that run's results if the tool has its default name. Of a process that
            was killed these are the tensors until its results were last saved.

    Raises:
        ResultError: There is no dump, or it is malformed.
    """
    if path.is_dir():
        inside = path / "dump"
        folder = path if (path / INDEX).exists() or not (inside / INDEX).exists() else inside
        if not (folder / INDEX).exists() and (record := record_beside(path, "dump")):
            return Dumped(read_index(path / "dump.json"), record)
        return Dumped(read_index(folder / INDEX), folder)
    beside = path.with_suffix("")
    return Dumped(read_index(path), beside if beside.is_dir() else path.parent)
