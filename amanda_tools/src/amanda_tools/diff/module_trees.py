"""Records of transformers' ``model_addition_debugger_context``, read like a dump.

Such a folder has a tree of modules as JSON and, with ``use_repr=False``, a safetensors file for
each tensor that a module reads and returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amanda_core.errors import ResultError
from amanda_core.results import tables
from amanda_tools.diff.places import MALFORMED
from amanda_tools.diff.tensor_files import ROOT, FileIndex, TensorFiles

__all__ = ["has_module_tree", "read_module_tree"]

_TREE = "*_debug_tree_FULL_TENSORS.json"
_FIX = "Record again: model_addition_debugger_context(model, debug_path=..., use_repr=False)"


def has_module_tree(path: Path) -> bool:
    """Return True for a folder of such a record."""
    return path.is_dir() and next(path.glob(_TREE), None) is not None


def read_module_tree(folder: Path) -> TensorFiles:
    """Read what each module returned and, of modules without others in them, what it read.

    Modules have their paths in the model as names, and the order in which they ended.

    Raises:
        ResultError: There are several records, or the tree is malformed.
    """
    trees = sorted(folder.glob(_TREE))
    if len(trees) > 1:
        raise _error(folder, f"it has {len(trees)} of them")
    files = FileIndex(folder)
    try:
        _add(files, tables.load(trees[0]))
    except MALFORMED as error:
        raise _error(trees[0], str(error)[:200]) from error
    return files.files()


def _error(where: Path, why: str) -> ResultError:
    return ResultError(
        f"This is not the record of one model_addition_debugger_context: {why}",
        where=str(where),
        fix=_FIX,
    )


def _add(files: FileIndex, node: dict[str, Any]) -> None:
    """Add a module and those in it."""
    path = str(node["module_path"])
    # The first part is the class of the model.
    name = path.partition(".")[2] or ROOT
    for child in node.get("children", []):
        _add(files, child)
    op = files.op(name)
    inputs = node.get("inputs", {})
    read = [*_tensors(inputs.get("args", [])), *_tensors(inputs.get("kwargs", {}))]
    wrote = [(str(n), one) for n, (_, one) in enumerate(_tensors(node.get("outputs", {})))]
    for what, found in (("input", read), ("output", wrote)):
        for position, tensor in found:
            value = tensor["value"]
            if isinstance(value, str) and value.endswith(".safetensors"):
                files.add_file(op, what, position, Path(value).name)
            else:
                files.leave_out("values are rounded texts, which use_repr=False prevents", name)


def _tensors(value: Any, position: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tensors of a value with their positions, such as ``1.0`` or ``hidden_states``."""
    if isinstance(value, dict) and {"shape", "dtype", "value"} <= value.keys():
        yield position or "0", value
        return
    if isinstance(value, (dict, list)):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(one, f"{position}.{name}" if position else str(name))
