"""The programs of `foreign`, and how often each of their ops runs, by their own loops.

A module for each theme, whose programs enter themselves into the list of `catalog`.
"""

from . import compilers, control, distributed, layouts, loops, tensors, watchers
from .catalog import PROGRAMS

__all__ = [
    "PROGRAMS",
    "compilers",
    "control",
    "distributed",
    "layouts",
    "loops",
    "tensors",
    "watchers",
]
