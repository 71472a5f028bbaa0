"""Weights as the operators of a model read them, in files that need no Amanda to be loaded.

Owns the folder: a ``.safetensors`` file for each model, the tool's masks or scales, and
``weights.json``, which says what was changed. `docs/guides/taking-results-home.md` describes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from amanda_core.errors import ToolError, UnsupportedError
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.interface.groups import Group
from amanda_core.weights.reads import Weight
from amanda_tools.kit.output.folders import whole_file, write_text
from amanda_tools.kit.tensors.values import HostTensor, host

__all__ = [
    "FORMAT",
    "Baked",
    "BakedModel",
    "Edit",
    "meet",
    "model_of",
    "on_whole",
    "values_of",
    "write_models",
    "write_tensors",
]

Edit = Callable[[Any], Any]

FORMAT = "amanda.baked/1"
#: Dtype -> its name in a .safetensors file.
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class Baked(NamedTuple):
    """A weight, and the function to be written into it; None if the tool does not change it."""

    weight: Weight
    facts: Facts
    edit: Edit | None


class BakedModel:
    """The values of a model's parameters as operators read them, and those of its buffers.

    Attributes:
        root: Name of the model.
        tensors: Name -> values. The names are those of the model's own checkpoints, if it has a
            ``state_dict``; a parameter that is there under several names is there under all.
        changed: The names of those that the tool has changed.
        is_written: Whether this process writes it: of those that hold parts of it the first one.

    It communicates if processes hold parts of the model, so each of them makes one.

    Args:
        root: Name of the model.
        model: The model; None if the framework does not tell. Then only the parameters that
            operators have read are there.
        weights: Its parameters.

    Raises:
        ToolError: A parameter is gone, or its values cannot be read.
    """

    def __init__(self, root: str, model: Any, weights: Sequence[Baked]) -> None:
        self.root = root
        facts = weights[0].facts
        named = _named(model, facts)
        self.is_written = meet(f"saving {root}", model, weights)
        by_id: dict[int, tuple[str, HostTensor, bool]] = {}
        for one in weights:
            parameter = one.weight.parameter
            if parameter is None:
                raise _lost(one.weight, "its model is gone")
            try:
                value = values_of(one.facts, parameter, one.edit)
            except Exception as error:
                raise _lost(one.weight, str(error) or type(error).__name__) from error
            by_id[id(parameter)] = one.weight.name, value, one.edit is not None
        self.tensors: dict[str, HostTensor] = {}
        self.changed: list[str] = []
        others = [entry for held, entry in by_id.items() if held not in {*map(id, named.values())}]
        entries = [(name, *by_id[id(v)][1:]) for name, v in named.items() if id(v) in by_id]
        for name, value, is_changed in (*entries, *others):
            self.tensors[name] = value
            self.changed += [name] * is_changed
        for name, held in named.items():
            if name not in self.tensors:
                self.tensors[name] = host(facts, facts.whole(held))


def meet(what: str, model: Any, weights: Sequence[Baked]) -> bool:
    """Wait for the other processes that hold parts of weights; return True in the first of them.

    Args:
        what: What is done, for the error.
        model: The model; None if it is not known.
        weights: Its weights.

    Raises:
        UnsupportedError: They did not come.
    """
    placed = [(one.facts, one.facts.placement(one.weight.parameter)) for one in weights]
    found = [(facts, placement) for facts, placement in placed if placement is not None]
    if not found:
        return True
    group = Group()
    with suppress(UnsupportedError):  # Then it is not known who they are.
        group = found[0][0].group(model)
    group.exchange(what)
    return group.rank == 0 and all(facts.rank() == one.ranks[0] for facts, one in found)


def on_whole(facts: Facts, edit: Edit) -> Edit:
    """Return an edit that also edits the part of a value that this process holds.

    Edits see whole values. To make one communicates.
    """

    def edited(values: Any) -> Any:
        if facts.placement(values) is None:
            return edit(values)
        return facts.cast(edit(facts.whole(values)), values)

    return edited


class _Read(Exception):
    """Leaves the update of a parameter before it is written."""


def values_of(facts: Facts, parameter: Any, edit: Edit | None = None) -> HostTensor:
    """Return the values of a parameter as edited; the parameter itself is not written.

    It communicates if processes hold parts of it.
    """
    if facts.placement(parameter) is not None:
        whole = facts.whole(parameter)
        return host(facts, whole if edit is None else edit(whole))
    found: list[HostTensor] = []

    def read(values: Any) -> Any:
        found.append(host(facts, values if edit is None else edit(values)))
        raise _Read

    try:
        facts.update(parameter, read)
    except _Read:
        pass
    except NotReadableError:
        # Arrays that cannot be written are their own values.
        if found or not facts.is_tensor(parameter):
            raise
        found.append(host(facts, parameter if edit is None else edit(parameter)))
    return found[0]


def _lost(weight: Weight, why: str) -> ToolError:
    return ToolError(
        f"The values of {weight.name} cannot be saved: {why}",
        fix="Call bake(model) or save_baked(folder) in the program, while the model is there",
    )


def _named(model: Any, facts: Facts) -> dict[str, Any]:
    """Return the parameters and buffers of a model by the names in its own checkpoints."""
    state = getattr(model, "state_dict", None)
    found = state(keep_vars=True) if callable(state) else {}
    return {name: value for name, value in found.items() if facts.is_tensor(value)}


def model_of(model: Any) -> list[Any]:
    """Return all parameters of a model that a program gives.

    Raises:
        ToolError: It is not a model with parameters.
    """
    for name in ("parameters", "variables"):
        found = getattr(model, name, None)
        if found is not None:
            return [_held(one) for one in (found() if callable(found) else found)]
    raise ToolError(
        f"A {type(model).__name__} has no parameters that can be listed",
        fix="Give the model, or nothing for all models that ran",
    )


def _held(variable: Any) -> Any:
    """Return what operators read of a variable: Keras wraps those of its backends."""
    inner = getattr(variable, "value", None)
    if inner is not None and not callable(inner):
        variable = inner
    return getattr(variable, "handle", variable)


def write_models(path: Path, models: Sequence[BakedModel], about: Mapping[str, Any]) -> list[Path]:
    """Write the weights of models into a folder, and what was changed.

    Args:
        path: The folder.
        models: The models.
        about: What else ``weights.json`` says.
    """
    described, files = {}, []
    for model in models:
        name = "weights" if len(models) == 1 else f"weights-{model.root.replace('/', '_')}"
        files.append(path / f"{name}.safetensors")
        write_tensors(files[-1], model.tensors)
        described[model.root] = {
            "file": files[-1].name,
            "changed": model.changed,
            "unchanged": [name for name in model.tensors if name not in {*model.changed}],
        }
    text = json.dumps({"format": FORMAT, **about, "models": described}, indent=2)
    write_text(path / "weights.json", text + "\n")
    return [*files, path / "weights.json"]


def write_tensors(path: Path, tensors: Mapping[str, HostTensor]) -> None:
    """Write a .safetensors file: a length, a header and the values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise NotReadableError(f"{name} is of {tensor.dtype}, which the file format lacks")
        begin, end = end, end + tensor.array.nbytes
        shape = list(tensor.array.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as new, open(new, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.array.tobytes())
