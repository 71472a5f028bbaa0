"""Records of SGLang's dumper, read like a dump.

Each file has one value and says in its name what it is, as in
``step=0___rank=0___dump_index=3___name=non_intrusive__up.output.pt``.
"""

from __future__ import annotations

import re
from pathlib import Path

from amanda_core.errors import ResultError
from amanda_tools.diff.places import MALFORMED, places_of
from amanda_tools.diff.tensor_files import ROOT, FileIndex, TensorFiles

__all__ = ["has_sglang_dump", "read_sglang_dump"]

_PATTERN = "*___dump_index=*.pt"
#: Tags that say nothing about what was recorded.
_OTHER = {"step", "forward_pass_id", "rank", "dump_index", "name", "recompute_status"}
#: What a hook of a module recorded: the module, the kind and the position.
_HOOK = re.compile(r"non_intrusive__(?:(?P<module>.+)\.)?(?P<what>inputs|output)(?:\.(?P<at>.+))?")


def has_sglang_dump(path: Path) -> bool:
    """Return True for a folder of such files, or one with such a folder."""
    return path.is_dir() and next(path.rglob(_PATTERN), None) is not None


def read_sglang_dump(folder: Path) -> TensorFiles:
    """Read what was recorded, in the order in which it was.

    What hooks of a module recorded has the module's path as name, and what the program recorded has
    the name that it gave, with its tags. Names in other ranks than 0 say which.

    Raises:
        ResultError: The folder has several records, or a file has no number.
    """
    found = sorted(folder.rglob(_PATTERN))
    if len(parents := {path.parent for path in found}) > 1:
        raise ResultError(
            f"This folder has {len(parents)} records of SGLang's dumper",
            where=str(folder),
            fix="Name the folder of one, such as " + str(found[0].parent),
        )
    tagged = [(_tags(path), path) for path in found]
    files = FileIndex(folder)
    for tags, path in sorted(tagged, key=lambda one: (one[0]["rank"], one[0]["dump_index"])):
        _add(files, tags, path)
    return files.files()


def _tags(path: Path) -> dict[str, str | int]:
    parts = (part.partition("=") for part in path.stem.split("___"))
    tags: dict[str, str | int] = {name: value for name, _, value in parts}
    try:
        for name in ("rank", "dump_index"):
            tags[name] = int(tags.get(name, 0))
        tags["step"] = int(tags.get("step", tags.get("forward_pass_id", 0)))
    except ValueError as error:
        raise ResultError(
            f"This file of SGLang's dumper has no number: {error}",
            where=str(path),
            fix="Give the files the names that the dumper gave them",
        ) from error
    return tags


def _add(files: FileIndex, tags: dict[str, str | int], path: Path) -> None:
    name, what, at = str(tags.get("name", "")), "output", ""
    if hook := _HOOK.fullmatch(name):
        name, at = hook["module"] or ROOT, hook["at"] or ""
        what = "input" if hook["what"] == "inputs" else "output"
    elif name.startswith("grad__"):
        name, what = name.removeprefix("grad__"), "grad_output"
    if not hook:
        name += "".join(f" {tag}={tags[tag]}" for tag in tags if tag not in _OTHER)
    if tags["rank"]:
        name += f" rank={tags['rank']}"
    file = path.relative_to(files.folder).as_posix()
    try:
        places = places_of(files.folder, file)
    except MALFORMED as error:
        files.leave_out(str(error)[:200] or type(error).__name__, file)
        return
    op = files.op(name)
    for place in places:
        key = place.key or ""
        # Beside the value there is what is known of it, which has no tensors of the program.
        if key == "value" or key.startswith("value."):
            position = ".".join(one for one in (at, key.removeprefix("value").strip(".")) if one)
            files.add(op, what, position or "0", place, int(tags["step"]))
