"""Functions that write, read or export a model work on it as it is without tools.

Owns their replacements. Their names are those of `tensorflow_internals.writers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from amanda_core.driver_kit import ModelWriters
from amanda_driver_tf.tensorflow_internals.writers import QUIET_FUNCTIONS, WRITERS
from amanda_driver_tf.threads import STATE, call_quietly

__all__ = ["WRITING"]


def _quietly_called(original: Callable[..., Any], writer: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        place = STATE.eager or STATE.graphs
        if writer and place is not None and not STATE.quiet:
            place.session.warn_of_writer(writer)
        return call_quietly(original, *args, **kwargs)

    return call


WRITING = ModelWriters(QUIET_FUNCTIONS, WRITERS, _quietly_called)
