"""Private names of PyTorch stand in one module of Python and one of C++."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import amanda_core
from amanda_core.testing.private_names import mentions, mentions_in_c, own_names
from amanda_driver_torch import _torch_internals

FOLDER = Path(__file__).parents[1] / "src/amanda_driver_torch"
OWNERS = {
    "_torch_internals.py",
    "native/torch_symbols.h",
    "native/torch_symbols.cpp",
    # Tables of operators by name: one that a version lacks does no harm.
    "_operators.py",
    "_overloads.py",
    "vocabulary.py",
}


#: Names that objects of PyTorch have which the driver meets.
NODE = torch.ones(1, requires_grad=True).exp().grad_fn
THEIRS = frozenset(
    name
    for thing in (
        *(torch.Tensor, nn.Module(), NODE, torch.autograd.Function, torch.UntypedStorage),
        *(torch.ops.aten.relu, torch.ops.aten.relu.default, torch.optim.Optimizer),
        *(torch.autograd, torch.autograd.forward_ad, torch.overrides, torch.utils.checkpoint),
    )
    for name in dir(thing)
    if name.startswith("_") and not name.startswith("__")
) - {"_values"}  # That of the core's contexts is read.


def sources() -> dict[str, str]:
    files = (p for end in ("*.py", "*.cpp", "*.h") for p in FOLDER.rglob(end))
    return {p.relative_to(FOLDER).as_posix(): p.read_text("utf-8") for p in files}


def own() -> frozenset[str]:
    core = Path(amanda_core.__file__).parent.rglob("*.py")
    python = [text for name, text in sources().items() if name.endswith(".py")]
    return own_names([*python, *(path.read_text("utf-8") for path in core)])


def found_in(name: str, text: str, known: frozenset[str]) -> list[str]:
    if name.endswith(".py"):
        places = mentions(text, "torch", known, theirs=THEIRS)
    else:
        places = mentions_in_c(text, "torch", known)
    return [f"{name}:{line}: {found}" for line, found in places]


def test_private_names_stand_in_their_owners_only() -> None:
    known = own()
    found = [
        line
        for name, text in sources().items()
        if name not in OWNERS
        for line in found_in(name, text, known)
    ]
    assert found == []


def test_in_tables_of_operators_only_names_of_operators_are_private() -> None:
    known = own()
    for name in OWNERS:
        if not name.startswith(("_torch", "native/")):
            found = found_in(name, sources()[name], known)
            assert [line for line in found if "." in line.partition(": ")[2]] == []


def test_the_owners_are_searched_as_all_else() -> None:
    known = own()
    for name in ("_torch_internals.py", "native/torch_symbols.h"):
        assert found_in(name, sources()[name], known)


def test_one_that_is_planted_is_found() -> None:
    known, texts = own(), sources()
    for name in ("_taps.py", "native/watch.cpp"):
        planted = {
            "_taps.py": texts[name] + "\n\ndef f(t): return t._version, torch._C.TensorBase\n",
            "native/watch.cpp": texts[name] + '\nconst char* name = "_version";\n',
        }[name]
        assert len(found_in(name, planted, known)) == (2 if name == "_taps.py" else 1)


def test_everything_that_the_module_offers_is_there() -> None:
    missing = [name for name in _torch_internals.__all__ if not hasattr(_torch_internals, name)]
    assert missing == []
