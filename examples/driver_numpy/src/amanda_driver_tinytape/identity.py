"""Which op a call of an operator belongs to.

tinytape has no modules, so a key of its own is enough: the place of the call identifies the op,
together with its parameters, because one line may run several layers. A framework with modules uses
`amanda_core.identity.sites`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tinytape
from amanda_core.driver_kit import OpRecord, Routes
from amanda_core.interface import Site
from tinytape import Leaf, Node, Operator, Tensor

__all__ = ["OpTable", "constant"]

NAMESPACE = f"tinytape/{tinytape.__version__}/eager"
#: Modules that are not the user's program.
_OWN = {"amanda_driver_tinytape.attachment", __name__, Routes.__module__, tinytape.__name__}


class OpTable:
    """The ops of a session. It outlives an attachment, because tools may be applied again."""

    def __init__(self) -> None:
        self._records: dict[Any, OpRecord] = {}

    def locate(self, operator: Operator, inputs: Sequence[Tensor]) -> OpRecord:
        """Return the record of an op. Its key is the same in each iteration and in each process."""
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] in _OWN:
            assert frame.f_back is not None
            frame = frame.f_back
        place = (str(frame.f_globals["__name__"]), frame.f_code.co_name, frame.f_lasti)
        names = tuple(tensor.source.name for tensor in inputs if isinstance(tensor.source, Leaf))
        key = (operator.name, place, names)
        if key not in self._records:
            name = "/".join([*filter(None, names), operator.name])
            file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
            source = f"{file}:{frame.f_lineno}"
            self._records[key] = OpRecord(Site(key, operator.name, NAMESPACE, name, source=source))
        return self._records[key]


def constant(tensor: Tensor) -> Tensor | None:
    """Return the value of an input for `OpContext.value`, or None if another op computed it."""
    return None if isinstance(tensor.source, Node) else tensor
