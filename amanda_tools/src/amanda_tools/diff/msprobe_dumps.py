"""Records of MindStudio's msProbe, of PyTorch and MindSpore, read like a dump.

A record has a folder for each step and rank, with a table ``dump.json`` of modules and functions in
the order in which they ended, and a file for each tensor if its task was ``tensor``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amanda_core.errors import ResultError
from amanda_core.interface.vocabulary import OP_TYPES
from amanda_core.results import tables
from amanda_tools.diff.places import MALFORMED
from amanda_tools.diff.tensor_files import FileIndex, TensorFiles
from amanda_tools.kit.tensors.statistics import Statistics

__all__ = ["has_msprobe_dump", "read_msprobe_dump"]

_TABLE = "dump.json"
#: A module, which has the name that it has in the model and its class, or a function.
_MODULE = re.compile(r"(?:Module|Cell)\.(.+)\.\w+\.(forward|backward|parameters_grad)(?:\.\d+)?")
_FUNCTION = re.compile(r"(.+\.\d+)\.(forward|backward)")
#: Direction and place in the table -> the kind of tensor.
_KINDS = {
    ("forward", "input_args"): "input",
    ("forward", "input_kwargs"): "input",
    ("forward", "parameters"): "weight",
    ("forward", "output"): "output",
    ("backward", "input"): "grad_output",
    ("backward", "output"): "grad_input",
}


def has_msprobe_dump(path: Path) -> bool:
    """Return True for a folder of such a record, or of one of its steps."""
    return path.is_dir() and next(path.rglob(_TABLE), None) is not None


def read_msprobe_dump(folder: Path) -> TensorFiles:
    """Read the modules and functions of all steps and ranks.

    Modules have their paths in the model as names, and functions names such as
    ``Functional.linear.0``. Names in other ranks than 0 say which. Of tensors without a file the
    statistics are read.

    Raises:
        ResultError: A table is malformed.
    """
    files = FileIndex(folder)
    found = [(_number(path, "step"), _number(path, "rank"), path) for path in folder.rglob(_TABLE)]
    for step, rank, path in sorted(found):
        try:
            for name, entry in tables.load(path)["data"].items():
                _add(files, step, rank, path.parent, name, entry)
        except MALFORMED as error:
            raise ResultError(
                f"This is not a table of msProbe: {type(error).__name__}: {error}"[:300],
                where=str(path),
                fix="Record again: PrecisionDebugger(task='tensor', ...)",
            ) from error
    return files.files()


def _number(path: Path, what: str) -> int:
    """Return the number of the step or rank in a path, such as that of ``step3/rank0``."""
    numbers = [re.fullmatch(what + r"(\d+)", part) for part in path.parts]
    return next((int(one[1]) for one in reversed(numbers) if one), 0)


def _add(
    files: FileIndex, step: int, rank: int, folder: Path, name: str, entry: dict[str, Any]
) -> None:
    if matched := _MODULE.fullmatch(name):
        word, own = "", matched[1]
    elif matched := _FUNCTION.fullmatch(name):
        own = matched[1]
        word = own.split(".")[-2].rstrip("_")
    else:
        raise ValueError(f"{name!r} is not a module or function")
    op = files.op(f"{own} rank={rank}" if rank else own, word if word in OP_TYPES else "")
    for place, value in entry.items():
        # Gradients of parameters are in an entry of their own, by the names of these.
        what = _KINDS.get((matched[2], place), "grad_input")
        within = place if matched[2] == "parameters_grad" else ""
        for position, tensor in _tensors(value, within):
            _add_tensor(files, op, what, position, step, folder, tensor)


def _add_tensor(
    files: FileIndex,
    op: int,
    what: str,
    position: str,
    step: int,
    folder: Path,
    tensor: dict[str, Any],
) -> None:
    if file := tensor.get("data_name"):
        path = folder / "dump_tensor_data" / Path(file).name
        files.add_file(op, what, position, path.relative_to(files.folder).as_posix(), step)
        return
    figures = [tensor.get(name) for name in ("Min", "Max", "Mean", "Norm")]
    if not any(isinstance(one, (int, float)) for one in figures):
        files.leave_out("neither a file nor statistics were recorded", files.index.ops[op].name)
        return
    low, high, mean, norm = (
        float(one) if isinstance(one, (int, float)) and math.isfinite(one) else None
        for one in figures
    )
    beyond = sum(isinstance(one, float) and not math.isfinite(one) for one in figures)
    # NaNs and infinities were not counted: those among the statistics are.
    found = Statistics(math.prod(tensor["shape"]), beyond, 0, 0, low, high, mean, None, norm, [])
    dtype = str(tensor["dtype"]).removeprefix("torch.").lower()
    files.add_figures(op, what, position, dtype, list(tensor["shape"]), found, step)


def _tensors(value: Any, position: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tensors of an entry with their positions, such as ``1.0`` or ``mask``."""
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        yield position or "0", value
    elif isinstance(value, (dict, list)):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(one, f"{position}.{name}" if position else str(name))
