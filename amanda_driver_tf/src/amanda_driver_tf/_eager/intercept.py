"""What is replaced in TensorFlow and Keras while some session is attached, and put back after.

Owns the replacements and the decision, at each call, whether somebody watches the calling thread.
Each calls the original elsewhere. What is done to an op is `execute`'s; backward passes `backward`'s.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from amanda_core.imports import ImportWatcher
from amanda_core.threads import THREAD
from amanda_driver_tf._eager.frames import BOUNDARY
from amanda_driver_tf._eager.op_types import OPAQUE, PLAIN, READ, op_type_of
from amanda_driver_tf._eager.symbols import (
    backprop,
    core,
    execute,
    executes_eagerly,
    forwardprop,
    imperative_grad,
    ops,
    pywrap_tfe,
    record,
    tape,
)
from amanda_driver_tf._state import STATE, quietly

__all__ = ["ORIGINALS", "PAIR", "PATCHES"]

#: Name of the attribute by which an op on a tape tells its gradient function which op it is.
#: TensorFlow passes attributes through that it does not know.
PAIR = "_amanda_eager"
