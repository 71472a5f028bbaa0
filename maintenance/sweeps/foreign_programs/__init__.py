"""Programs of `foreign`, and how often each of their ops runs according to their own loops.

There is one module for each theme. Its programs register themselves in `catalog`.
"""

from . import (
    compilers,
    control,
    distributed,
    keras_libraries,
    layouts,
    libraries,
    loops,
    tensorflow_libraries,
    tensors,
    trainers,
    watchers,
)
from .catalog import PROGRAMS

__all__ = [
    "PROGRAMS",
    "compilers",
    "control",
    "distributed",
    "keras_libraries",
    "layouts",
    "libraries",
    "loops",
    "tensorflow_libraries",
    "tensors",
    "trainers",
    "watchers",
]
