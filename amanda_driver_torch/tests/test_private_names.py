"""Private names and releases of PyTorch stand in one Python package and one C++ file only."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from amanda_core.testing.checks.private_names import DriverSources, has_underscore

pytestmark = pytest.mark.one_interceptor

OWNERS = {
    "torch_internals/dynamo.py",
    "torch_internals/dynamo_guards.py",
    "torch_internals/distributed.py",
    "torch_internals/entry_points.py",
    "torch_internals/inductor.py",
    "torch_internals/internals.py",
    "torch_internals/modules.py",
    "torch_internals/wrapper_modules.py",
    "native/torch_symbols.h",
    "native/torch_symbols.cpp",
    # Tables of operators by name: one that a version lacks does no harm.
    "operators/bindings.py",
    "operators/overloads.py",
    "vocabulary.py",
}


@functools.cache  # Not at import: it parses the sources, and other tests are collected, too.
def sources() -> DriverSources:
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    things = (
        *(torch.Tensor, nn.Module(), node, torch.autograd.Function, torch.UntypedStorage),
        *(torch.ops.aten.relu, torch.ops.aten.relu.default, torch.optim.Optimizer),
        *(torch.autograd, torch.autograd.forward_ad, torch.overrides, torch.utils.checkpoint),
    )
    #: Names of attributes of PyTorch's objects that the driver uses.
    found = {name for thing in things for name in dir(thing) if has_underscore(name)}
    package = Path(__file__).parents[1] / "src/amanda_driver_torch"
    # `_values` of the core's contexts is read.
    return DriverSources(package, "torch", theirs=frozenset(found) - {"_values"})


def test_private_names_stand_in_their_owners_only() -> None:
    others = [name for name in sources().texts if name not in OWNERS]
    assert [line for name in others for line in sources().mentions(name)] == []


#: PyTorch's releases.
RELEASES = r"\b2\.\d\d\b"


def test_releases_stand_in_their_owners_only() -> None:
    owners = {*OWNERS, "torch_internals/versions.py"}
    others = [name for name in sources().texts if name not in owners]
    assert [line for name in others for line in sources().releases(name, RELEASES)] == []
    for name in ("torch_internals/internals.py", "torch_internals/versions.py"):
        assert sources().releases(name, RELEASES)


def test_a_release_that_is_planted_is_found() -> None:
    planted = "\nif torch.__version__ >= '2.14': pass  # PyTorch 2.13 has none.\n"
    for name, count in (("compiled/choice.py", 3), ("native/watch.cpp", 2)):
        text = sources().texts[name] + planted
        assert len(sources().releases(name, RELEASES, text)) == count


def test_in_tables_of_operators_only_names_of_operators_are_private() -> None:
    for name in OWNERS:
        if not name.startswith(("torch_internals", "native/")):
            found = sources().mentions(name)
            assert [line for line in found if "." in line.partition(": ")[2]] == []


def test_the_owners_are_searched_as_all_else() -> None:
    for name in ("torch_internals/internals.py", "native/torch_symbols.h"):
        assert sources().mentions(name)


def test_one_that_is_planted_is_found() -> None:
    for name, planted, count in [
        ("gradients/taps.py", "\n\ndef f(t): return t._version, torch._C.TensorBase\n", 2),
        ("native/watch.cpp", '\nconst char* name = "_version";\n', 1),
    ]:
        assert len(sources().mentions(name, sources().texts[name] + planted)) == count


def test_everything_that_the_driver_takes_from_the_owners_is_there() -> None:
    taken = {
        (str(node.module), alias.name)
        for text in (text for name, text in sources().texts.items() if name.endswith(".py"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and "torch_internals." in str(node.module)
        for alias in node.names
    }
    assert len(taken) > 100
    assert [
        f"{module}.{name}"
        for module, name in sorted(taken)
        if not hasattr(importlib.import_module(module), name)
    ] == []
