"""Programs of `foreign`, and how often each of their ops runs according to their own loops.

There is one module for each theme. Its programs register themselves in `catalog`.
"""

from . import (
    architectures,
    compilers,
    control,
    distributed,
    keras_libraries,
    layouts,
    libraries,
    loops,
    optimizers,
    styles,
    tensorflow_libraries,
    tensors,
    trainers,
    watchers,
)
from .catalog import PROGRAMS

__all__ = [
    "PROGRAMS",
    "architectures",
    "compilers",
    "control",
    "distributed",
    "keras_libraries",
    "layouts",
    "libraries",
    "loops",
    "optimizers",
    "styles",
    "tensorflow_libraries",
    "tensors",
    "trainers",
    "watchers",
]
