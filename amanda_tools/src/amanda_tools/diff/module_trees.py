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
from amanda_tools.diff.tensor_files import MALFORMED, Place, TensorFiles, file_op, places_of
from amanda_tools.dump.index import DumpedTensor, DumpIndex, LeftOut

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
    reader = _Reader(folder)
    try:
        reader.add(tables.load(trees[0]))
    except (*MALFORMED, AttributeError, RecursionError) as error:
        raise _error(trees[0], str(error)[:200]) from error
    return TensorFiles(reader.index, folder, reader.places)


def _error(where: Path, why: str) -> ResultError:
    return ResultError(
        f"This is not the record of one model_addition_debugger_context: {why}",
        where=str(where),
        fix=_FIX,
    )


class _Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = DumpIndex()
        self.places: list[Place] = []
        self._numbers: dict[str, int] = {}

    def add(self, node: dict[str, Any]) -> None:
        """Add a module and those in it."""
        path = str(node["module_path"])
        # The first part is the class of the model.
        name = path.partition(".")[2] or path
        children = node.get("children", [])
        for child in children:
            self.add(child)
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self.index.ops):
            self.index.ops.append(file_op(name, ""))
        op = self.index.ops[number]
        inputs = node.get("inputs", {})
        read = [*_tensors(inputs.get("args", [])), *_tensors(inputs.get("kwargs", {}))]
        wrote = [(str(n), one) for n, (_, one) in enumerate(_tensors(node.get("outputs", {})))]
        for what, found in (("input", [] if children else read), ("output", wrote)):
            for position, tensor in found:
                self._add_tensor(number, op.calls, what, position, tensor)
        op.calls += 1

    def _add_tensor(
        self, op: int, execution: int, what: str, position: str, tensor: dict[str, Any]
    ) -> None:
        value = tensor["value"]
        if not (isinstance(value, str) and value.endswith(".safetensors")):
            name = self.index.ops[op].name
            self._leave_out("values are rounded texts, which use_repr=False prevents", name)
            return
        file = Path(value).name
        try:
            (place,) = places_of(self.folder, file)
        except MALFORMED as error:
            self._leave_out(str(error)[:200] or type(error).__name__, file)
            return
        self.places.append(place)
        self.index.tensors.append(
            DumpedTensor(op, 0, execution, what, position, "", place.dtype, place.shape, place.file)
        )

    def _leave_out(self, reason: str, name: str) -> None:
        same = next((one for one in self.index.left_out if one.reason == reason), None)
        if same is None:
            self.index.left_out.append(LeftOut(reason, name, 0, tensors=1))
        else:
            same.tensors += 1


def _tensors(value: Any, position: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tensors of a value with their positions, such as ``1.0`` or ``hidden_states``."""
    if isinstance(value, dict) and {"shape", "dtype", "value"} <= value.keys():
        yield position or "0", value
        return
    if isinstance(value, (dict, list)):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(one, f"{position}.{name}" if position else str(name))
