"""The forms of records that can be compared, and which one a path has.

A reader recognizes what it can read and returns it as a dump. A new form needs one more row here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from amanda_tools.diff.module_trees import has_module_tree, read_module_tree
from amanda_tools.diff.msprobe_dumps import has_msprobe_dump, read_msprobe_dump
from amanda_tools.diff.saving import has_etdump, refuse_etdump
from amanda_tools.diff.sglang_dumps import has_sglang_dump, read_sglang_dump
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


def _is_dump(path: Path) -> bool:
    return any((path / one / INDEX).exists() for one in ("", "dump"))


#: The first that recognizes a path reads it.
_READERS = (
    _Reader(_is_dump, load_dump),
    _Reader(has_module_tree, read_module_tree),
    _Reader(has_sglang_dump, read_sglang_dump),
    _Reader(has_msprobe_dump, read_msprobe_dump),
    _Reader(has_etdump, refuse_etdump),
    _Reader(has_tensor_files, read_tensor_files),
)


def read_record(path: Path) -> Dumped:
    """Read a dump, or what another program recorded.

    Raises:
        ResultError: No reader recognizes the path, or the record is malformed.
    """
    read = next((one.read for one in _READERS if one.recognizes(path)), load_dump)
    return read(path)
