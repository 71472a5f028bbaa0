"""Substitute for a package that copies of PyTorch's tests import; it provides no device.

Tests that are made for its device only are made for the CPU instead.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import unittest
from collections.abc import Sequence
from typing import Any

import torch
from torch.testing._internal import common_device_type, common_utils

#: Names of the package that are PyTorch's own.
_OURS = {"TestCase": common_utils.TestCase, "run_tests": common_utils.run_tests}
_ABSENT = {"is_available": False, "device_count": 0, "get_device_name": ""}


class _Decorator:
    """A condition of a test, which does not hold here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (types.FunctionType, type)):
            return unittest.skip(f"{self.name} is of a device that is not here")(args[0])
        return self


class _Absent(types.ModuleType):
    """A module of the package; any other name in it skips the test that uses it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ABSENT:
            return lambda *_: _ABSENT[name]
        if "testing" in self.__name__:
            return _OURS.get(name) or _Decorator(f"{self.__name__}.{name}")
        raise unittest.SkipTest(f"{self.__name__}.{name} is of a device that is not here")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = fullname.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


class _Uncopied(_Finder):
    """Finds modules of tests that a test imports and that were not copied: they have no tests."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = fullname.startswith("jit.test_")
        return importlib.machinery.ModuleSpec(fullname, self) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Uncopied.Module(spec.name)

    class Module(types.ModuleType):
        """A module; any name in it is a class without tests."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})


sys.meta_path.insert(0, _Finder())
sys.meta_path.append(_Uncopied())
torch.npu = importlib.import_module(f"{__name__}.npu")  # type: ignore[attr-defined]

_filter: Any = common_device_type.filter_desired_device_types


def _filter_with_cpu(bases: Any, except_for: Any = None, only_for: Any = None) -> Any:
    names = {only_for} if isinstance(only_for, str) else set(only_for or ())
    return _filter(bases, except_for, "cpu" if names & {"npu", "privateuse1"} else only_for)


common_device_type.filter_desired_device_types = _filter_with_cpu
