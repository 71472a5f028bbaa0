"""The search for private names of a framework in a driver's sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from amanda_core.testing.checks.private_names import (
    DriverSources,
    mentions,
    mentions_in_c,
    own_names,
)
from amanda_core.testing.checks.public_names import private_uses


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C.relu",
        "import torch\ntorch.nn._x",
        "import torch as t\nt._C",
        "from torch import nn\nnn.modules._functions.f",
        "from torch._ops import OpOverload",
        "from torch import _C",
        "import torch.utils._pytree",
        "value._base",
        "f(value).node._sequence_nr()",
        "self._inherited",
        "getattr(value, '_base')",
        "modules['torch._tensor']",
        "import torch\nf'torch._C.{name}'",
        "f('Graph._functions')",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert len(mentions(source, "torch", ())) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.functional.relu",
        '"""Mentions `torch._C` in words."""',
        "def f():\n    'torch._C'",
        "import sys\nsys._getframe()",
        "value.__dict__",
        "value._amanda_mark",
        "print('code under torch._C.DisableTorchFunction()')",
        "from amanda_driver_torch._native import Program",
        "'amanda_driver_torch._native'",
        "class A:\n    def _f(self): self._g = self._f",
        "class A:\n    __slots__ = ('_x',)\ndef f(a): return a._x",
    ],
)
def test_others_are_not(source: str) -> None:
    assert mentions(source, "torch", own_names([source])) == []


def test_what_is_assigned_to_another_object_is_not_ones_own() -> None:
    source = "value._base = None"
    assert mentions(source, "torch", own_names([source])) != []


def test_a_name_that_both_have_is_ones_own_on_self_only() -> None:
    source = "class A:\n    def f(self, graph): self._lock = 0; return self._lock, graph._lock"
    own = own_names([source])
    assert mentions(source, "tensorflow", own) == []
    assert len(mentions(source, "tensorflow", own, theirs=["_lock"])) == 1


@pytest.mark.parametrize("function", ["getattr", "setattr", "hasattr", "delattr"])
def test_a_name_that_is_looked_up_is_another_objects(function: str) -> None:
    source = f"class A:\n    def f(self, x): self._lock = '_lock'; {function}(x, '_lock')"
    own = own_names([source])
    assert mentions(source, "tensorflow", own) == []
    assert len(mentions(source, "tensorflow", own, theirs=["_lock"])) == 1


def test_the_caller_says_what_is_private() -> None:
    source = "from tensorflow.python.eager import context\ncontext.context()"
    found = mentions(source, "tensorflow", (), lambda name: ".python." in name)
    assert [mention.name for mention in found] == ["tensorflow.python.eager.context"]


def test_literals_of_c_are_found() -> None:
    source = 'find("_base");\n// "_words"\n#include "_x.h"\nfind("name", "_own");\nf("torch._C");\n'
    found = mentions_in_c(source, "torch", ["_own"])
    assert [(mention.line, mention.name) for mention in found] == [(1, "_base"), (5, "torch._C")]


def test_sources_of_a_driver_are_searched_by_their_language(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "watch.cpp").write_text('find("_base"); find("_own");\n')
    (tmp_path / "taps.py").write_text("def _own(t): return t._version\n")
    (tmp_path / "notes.txt").write_text("torch._C")
    sources = DriverSources(tmp_path, "torch")
    assert sorted(sources.texts) == ["native/watch.cpp", "taps.py"]
    assert sources.mentions("taps.py") == ["taps.py:1: …._version"]
    assert sources.mentions("native/watch.cpp") == ["native/watch.cpp:1: _base"]
    assert sources.mentions("taps.py", "import torch\ntorch._C\n") == ["taps.py:2: torch._C"]


@pytest.mark.parametrize(
    "use",
    [
        "session._store",
        "tool._amanda.logs",
        "getattr(context, '_recorder')",
        "setattr(self.session, '_hooks', None)",
        "context._plans.clear()",
    ],
)
def test_what_objects_of_the_core_keep_for_themselves_is_not_a_drivers(
    tmp_path: Path, use: str
) -> None:
    # The driver has names of its own that are the same.
    own = "class A:\n    def __init__(self): self._store = self._plans = self._hooks = '_store'\n"
    (tmp_path / "driver.py").write_text(f"{own}    def f(self, session, context, tool): pass\n")
    assert private_uses(tmp_path) == []
    (tmp_path / "driver.py").write_text(f"{own}    def f(self, session, context, tool): {use}\n")
    (found,) = private_uses(tmp_path)
    assert "driver.py:3: " in found
