"""The forms of records that can be compared, and which one a path has.

A reader recognizes what it can read and returns it as a dump. A new form needs one more row here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from amanda_core.errors import ResultError
from amanda_tools.diff.module_trees import has_module_tree, read_module_tree
from amanda_tools.diff.tensor_files import has_tensor_files, read_tensor_files
from amanda_tools.dump.files import Dumped, load_dump
from amanda_tools.dump.index import INDEX

__all__ = ["read_record"]


class _Reader(NamedTuple):
    """Reads one form of records.

    Attributes:
        recognizes: Returns True for a path that it reads.
        read: Reads it.
    """

    recognizes: Callable[[Path], bool]
    read: Callable[[Path], Dumped]


def _has_pickles(path: Path) -> bool:
    return path.is_dir() and next(path.rglob("*.pt"), None) is not None


def _refuse_pickles(path: Path) -> Dumped:
    raise ResultError(
        "Files of torch.save, such as those of SGLang's dumper and msProbe, are pickles, which are "
        "not read",
        where=str(path),
        fix="Write each tensor as a .npy or .safetensors file, and if names differ a table "
        "names.json",
    )


def _is_dump(path: Path) -> bool:
    return path.is_file() or any((path / one / INDEX).exists() for one in ("", "dump"))


#: The first that recognizes a path reads it.
_READERS = (
    _Reader(_is_dump, load_dump),
    _Reader(has_module_tree, read_module_tree),
    _Reader(has_tensor_files, read_tensor_files),
    _Reader(_has_pickles, _refuse_pickles),
)


def read_record(path: Path) -> Dumped:
    """Read a dump, or what another program recorded.

    Raises:
        ResultError: No reader recognizes the path, or the record is malformed.
    """
    read = next((one.read for one in _READERS if one.recognizes(path)), load_dump)
    return read(path)
