"""Substitute for a package that copies of PyTorch's tests import; it provides no device.

Tests that are made for its device only are made for the CPU instead.
"""

import sys
import types
from typing import Any
from unittest import SkipTest

import torch
from torch.testing._internal import common_device_type


class _Absent(types.ModuleType):
    """A module of the package; any name in it skips the test that uses it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "is_available":
            return lambda: False
        if name == "device_count":
            return lambda: 0
        if name == "get_device_name":
            return lambda *_: ""
        raise SkipTest(f"{self.__name__}.{name} is of a device that is not here")


for _name in ("npu", "testing", "utils", "_C"):
    _module = _Absent(f"{__name__}.{_name}")
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    globals()[_name] = _module

torch.npu = sys.modules[f"{__name__}.npu"]  # type: ignore[attr-defined]


_filter = common_device_type.filter_desired_device_types


def _filter_with_cpu(bases: Any, except_for: Any = None, only_for: Any = None) -> Any:
    names = {only_for} if isinstance(only_for, str) else set(only_for or ())
    return _filter(bases, except_for, "cpu" if names & {"npu", "privateuse1"} else only_for)


common_device_type.filter_desired_device_types = _filter_with_cpu
