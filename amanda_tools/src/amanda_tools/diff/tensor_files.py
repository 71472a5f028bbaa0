"""Files of tensors that other programs wrote, read like a dump.

A table ``names.json`` or ``names.csv`` may give the tensors names and common operator types.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from amanda_core.errors import ResultError
from amanda_core.results import tables
from amanda_tools.diff.places import MALFORMED, SUFFIXES, Place, natural, places_of
from amanda_tools.dump.files import Dumped
from amanda_tools.dump.index import DumpedOp, DumpedTensor, DumpIndex, LeftOut
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.tensors.statistics import Statistics
from amanda_tools.kit.tensors.values import HostTensor

__all__ = [
    "FRAMEWORK",
    "ROOT",
    "TABLES",
    "FileIndex",
    "TensorFiles",
    "has_tensor_files",
    "read_tensor_files",
]

#: What stands for the framework in the namespace of such tensors.
FRAMEWORK = "files"
#: Name of the module that is the model.
ROOT = "(model)"
#: Names of the tables.
TABLES = ("names.json", "names.csv")


class TensorFiles(Dumped):
    """Tensors of a folder, which can be read like those of a dump.

    Args:
        index: Their names.
        folder: The folder.
        places: Where each tensor of the index is; None for those with statistics only.
    """

    def __init__(self, index: DumpIndex, folder: Path, places: Sequence[Place | None]) -> None:
        super().__init__(index, folder)
        self._places = {
            id(tensor): place for tensor, place in zip(index.tensors, places, strict=True)
        }

    def read(self, tensor: DumpedTensor) -> HostTensor:
        """Read the values of a tensor.

        Raises:
            ResultError: The file has changed since the folder was read, or only statistics of the
                tensor were recorded.
        """
        place = self._places[id(tensor)]
        if place is None:
            raise ResultError(
                "Only statistics of a tensor were recorded",
                where=str(self.folder),
                fix="Record the tensors as well",
            )
        try:
            array = place.values(self.folder)
        except MALFORMED as error:
            raise ResultError(
                f"A tensor cannot be read: {error}"[:300],
                where=str(self.folder / place.file),
                fix="Write the file again, and do not change it during the comparison",
            ) from error
        return HostTensor(array, tensor.dtype)


class FileIndex:
    """Collects what another program recorded, in the order in which it did.

    Args:
        folder: The folder of its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = DumpIndex()
        self.places: list[Place | None] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._seen: Counter[tuple[int, str, str]] = Counter()

    def op(self, name: str, word: str = "") -> int:
        """Return the number of an operator or module, which is added if it is new."""
        number = self._numbers.setdefault((name, word), len(self._numbers))
        if number == len(self.index.ops):
            # Equal names have equal ids, as those of operators.
            digest = hashlib.blake2b(f"{name}\0{word}".encode(), digest_size=6).digest()
            facts = OpFacts(
                *(int.from_bytes(digest, "big"), word or "tensor", word or None, name, "", None),
                namespace=f"{FRAMEWORK}//{FRAMEWORK}",
            )
            self.index.ops.append(
                DumpedOp(**vars(facts), inputs=[], input_roles=[], layout=None, weight_layout=None)
            )
        return number

    def add(self, op: int, what: str, position: str, place: Place, step: int = 0) -> None:
        """Add a tensor; the next one of this kind is that of the next execution."""
        self._add(op, what, position, step, place.dtype, place.shape).file = place.file
        self.places.append(place)

    def add_file(self, op: int, what: str, position: str, file: str, step: int = 0) -> None:
        """Add the only tensor of a file, or what is wrong with the file."""
        try:
            (place,) = places_of(self.folder, file)
        except MALFORMED as error:
            self.leave_out(str(error)[:200] or type(error).__name__, file)
            return
        self.add(op, what, position, place, step)

    def add_figures(
        self,
        op: int,
        what: str,
        position: str,
        dtype: str,
        shape: list[int],
        figures: Statistics,
        step: int,
    ) -> None:
        """Add a tensor of which only statistics were recorded."""
        self._add(op, what, position, step, dtype, shape).statistics = figures
        self.places.append(None)

    def _add(
        self, op: int, what: str, position: str, step: int, dtype: str, shape: list[int]
    ) -> DumpedTensor:
        execution = self._seen[op, what, position]
        self._seen[op, what, position] += 1
        self.index.ops[op].calls = max(self.index.ops[op].calls, execution + 1)
        tensor = DumpedTensor(op, step, execution, what, position, "", dtype, shape)
        self.index.tensors.append(tensor)
        return tensor

    def leave_out(self, reason: str, first: str) -> None:
        """Count a tensor that cannot be compared."""
        same = next((one for one in self.index.left_out if one.reason == reason), None)
        if same is None:
            self.index.left_out.append(LeftOut(reason, first, 0, tensors=1))
        else:
            same.tensors += 1

    def files(self) -> TensorFiles:
        """Return what was collected.

        Of modules that contain others only the outputs are: they are judged by those in them.
        """
        names = [one.name for one in self.index.ops]
        inner = {name.rpartition(".")[0] for name in names}
        while more := {name.rpartition(".")[0] for name in inner} - inner:
            inner |= more
        kept = [
            (tensor, place)
            for tensor, place in zip(self.index.tensors, self.places, strict=True)
            if tensor.what != "input" or names[tensor.op] not in inner | {ROOT}
        ]
        self.index.tensors = [tensor for tensor, _ in kept]
        self.places = [place for _, place in kept]
        return TensorFiles(self.index, self.folder, self.places)


def has_tensor_files(path: Path) -> bool:
    """Return True for such a file, or a folder that has one."""
    return path.suffix in SUFFIXES if path.is_file() else next(_files(path), None) is not None


def read_tensor_files(path: Path) -> TensorFiles:
    """Read the names and shapes of the tensors of a file, or of a folder and the folders in it.

    Tensors that a table ``names.json`` or ``names.csv`` lists come first, in its order. The others
    follow by file name, with numbers in numeric order. Tensors of one name are executions of one
    operator.

    Raises:
        ResultError: The table of names is malformed.
    """
    folder = path.parent if path.is_file() else path
    named = {} if path.is_file() else _table(folder)
    index = FileIndex(folder)
    places: list[Place] = []
    unread = set()
    for file in [path.name] if path.is_file() else sorted(_files(folder), key=natural):
        try:
            places += places_of(folder, file)
        except MALFORMED as error:
            index.index.left_out.append(
                LeftOut(str(error)[:200] or type(error).__name__, file, 0, 1)
            )
            unread.add(file)
    found = {place.file for place in places} | {_entry(place) for place in places}
    index.index.left_out += [
        LeftOut("it is in the table of names only", entry, 0, 1)
        for entry in named
        if entry not in found and entry not in unread
    ]
    order = {entry: number for number, entry in enumerate(named)}
    keys = Counter(place.key for place in places)
    rows = [(_entry(place) if _entry(place) in named else place.file, place) for place in places]
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    for entry, place in rows:
        stem = place.file.rpartition(".")[0]
        own = place.key or stem
        if place.key and keys[place.key] > 1:
            own = f"{stem}.{place.key}"
        index.add(index.op(*named.get(entry, (own, ""))), "output", "0", place)
    return index.files()


def _entry(place: Place) -> str:
    return f"{place.file}:{place.key}" if place.key else place.file


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of the files in a folder, with slashes."""
    for path in folder.rglob("*"):
        if path.suffix in SUFFIXES and path.is_file():
            yield path.relative_to(folder).as_posix()


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
