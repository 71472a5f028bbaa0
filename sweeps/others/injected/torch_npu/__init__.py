"""Substitute for a package that copies of PyTorch's tests import; it provides no device."""

import sys
import types
from typing import Any
from unittest import SkipTest

import torch


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
