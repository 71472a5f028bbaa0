"""Values that a program holds, written as a folder that can be compared.

ExecuTorch's `Inspector` reads an ETDump. It may unpickle a record of the export, so only a program
that has such a record calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from amanda_core.errors import ResultError
from amanda_core.interface.vocabulary import OP_TYPES
from amanda_tools.kit.tensors.values import need_numpy

__all__ = ["has_etdump", "refuse_etdump", "save_arrays", "save_inspected"]

#: What an event of `Inspector` may hold beside tensors.
_NO_TENSORS = (bool, int, float, str, list, tuple, type(None))


class _Event(NamedTuple):
    op: str
    module: str
    tensors: list[Any]


def has_etdump(path: Path) -> bool:
    """Return True for an ETDump, or a folder with one."""
    return path.suffix == ".etdp" or (path.is_dir() and next(path.glob("*.etdp"), None) is not None)


def refuse_etdump(path: Path) -> NoReturn:
    """Say how an ETDump is compared.

    Raises:
        ResultError: Always.
    """
    raise ResultError(
        "Only ExecuTorch's Inspector can read an ETDump",
        where=str(path),
        fix="Write a folder, and compare that: amanda_tools.diff.save_inspected("
        "Inspector(etdump_path=..., debug_buffer_path=..., etrecord=...), folder)",
    )


def save_inspected(inspector: Any, folder: Path | str) -> None:
    """Write what the operators of an exported program returned, for `compare` and ``amanda diff``.

    With an ETRecord, what a module without others in it returned has the module's path as name, and
    other operators have it before their own. Without, only operators' types are known. Numbers that
    NumPy lacks, such as those in bfloat16, are written as float32.

    Args:
        inspector: An ``executorch.devtools.Inspector``, made with the path of the debug buffer.
        folder: Folder to write to, which must not exist or be empty.

    Raises:
        ResultError: The folder is not empty, or no event has values.
        ImportError: NumPy is not installed.

    >>> save_inspected(Inspector(etdump_path="e.etdp", debug_buffer_path="b.bin"), "device")
    ... # doctest: +SKIP
    """
    folder = Path(folder)
    events = list(_events(inspector))
    if not any(event.tensors for event in events):
        raise ResultError(
            "No event of the inspector has values",
            where=str(folder),
            fix="Record them on the device, with a debug buffer that is large enough, and give "
            "Inspector its debug_buffer_path",
        )
    rows = []
    for number, event in enumerate(events):
        after = events[number + 1].module if number + 1 < len(events) else None
        inside = f"{event.module}."
        is_result = event.module and event.module != after
        if is_result and not any(one.module.startswith(inside) for one in events):
            name = event.module
        else:
            name = f"{event.module}/{event.op}".lstrip("/")
        for nth, tensor in enumerate(event.tensors):
            rows.append((f"{name}:{nth}" if nth else name, event.op, tensor))
    _save(rows, folder)


def save_arrays(values: Mapping[str, Any], folder: Path | str) -> None:
    """Write named arrays as a folder for `compare` and ``amanda diff``, in their order.

    Args:
        values: Name -> an array or tensor, or a list with one for each execution, such as what
            ``collect_activations`` of ONNX Runtime's ``qdq_loss_debug`` returns. Numbers that NumPy
            lacks, such as those in bfloat16, are written as float32.
        folder: Folder to write to, which must not exist or be empty.

    Raises:
        ResultError: The folder is not empty.
        ImportError: NumPy is not installed.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_arrays({"up": [1.0, 2.0]}, folder)
    """
    rows = []
    for name, value in values.items():
        several = value if isinstance(value, (list, tuple)) else [value]
        rows += [(name, "", one) for one in several]
    _save(rows, Path(folder))


def _save(rows: Sequence[tuple[str, str, Any]], folder: Path) -> None:
    """Write the name, the type and the values of each row."""
    need_numpy()
    import numpy

    if folder.exists() and any(folder.iterdir()):
        raise ResultError(
            "The folder is not empty", where=str(folder), fix="Name one that does not exist"
        )
    folder.mkdir(parents=True, exist_ok=True)
    table = []
    for number, (name, op, values) in enumerate(rows):
        file = f"{number}.npy"
        numpy.save(folder / file, _array(values), allow_pickle=False)
        table.append({"file": file, "name": name, "type": op if op in OP_TYPES else ""})
    (folder / "names.json").write_text(json.dumps(table))


def _events(inspector: Any) -> Iterator[_Event]:
    for block in inspector.event_blocks:
        # What calls an operator has its values once more.
        seen = set()
        for event in block.events:
            place = event._instruction_id, str(event.delegate_debug_identifier)
            tensors = [one for one in event.debug_data if not isinstance(one, _NO_TENSORS)]
            if not tensors or place in seen:
                continue
            seen.add(place)
            op = event.name.removeprefix("native_call_").partition(".")[0]
            module = ""
            for node, modules in event.module_hierarchy.items():
                if op in node or not module:
                    module = next(reversed([path for path, _ in modules.values()]), "")
            yield _Event(op, module, tensors)


def _array(values: Any) -> Any:
    import numpy

    try:
        return numpy.asarray(values)
    except (TypeError, RuntimeError):  # On a device, with gradients, or of a dtype NumPy lacks.
        values = values.detach().cpu()
    try:
        return values.numpy()
    except TypeError:
        return values.float().numpy()
