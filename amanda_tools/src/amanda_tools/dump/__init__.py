"""Dump: write the inputs, weights, outputs and gradients of operators to files."""

from amanda_tools.dump.files import Dumped, load_dump
from amanda_tools.dump.index import DumpedOp, DumpedTensor, DumpIndex, LeftOut, read_index
from amanda_tools.dump.tool import Dump, DumpResult

__all__ = [
    "Dump",
    "DumpIndex",
    "DumpResult",
    "Dumped",
    "DumpedOp",
    "DumpedTensor",
    "LeftOut",
    "load_dump",
    "read_index",
]
