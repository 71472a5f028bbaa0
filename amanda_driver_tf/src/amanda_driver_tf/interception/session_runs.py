"""Interception of the `tf.compat.v1.Session` methods that run graphs.

Owns which calls are passed to what instruments their thread.
"""

from __future__ import annotations

import functools
from typing import Any

from amanda_core.driver_kit import Patches
from amanda_driver_tf.tensorflow_internals.entry_points import (
    DO_CALL,
    SESSION_PARTIAL_RUN,
    SESSION_RUN,
)
from amanda_driver_tf.tensorflow_internals.names import SETUP_OF_PARTIAL_RUN
from amanda_driver_tf.threads import STATE, Request, joins

__all__ = ["PATCHES"]


class _SessionRuns(Patches):
    """The methods of sessions that are replaced while any thread is attached."""

    def install(self) -> None:
        for entry_point, make in (
            (SESSION_RUN, _running),
            (SESSION_PARTIAL_RUN, _running_partially),
            (DO_CALL, _setting_up),
        ):
            self.replace(*entry_point, make(entry_point.current))


PATCHES = _SessionRuns()


def _running(original: Any) -> Any:
    @functools.wraps(original)
    def run(
        self: Any,
        options: Any,
        feed_dict: Any,
        fetch_list: Any,
        target_list: Any,
        run_metadata: Any,
    ) -> Any:
        graphs = STATE.graphs
        if graphs is None and joins("a run of a graph"):
            graphs = STATE.graphs
        if graphs is None or STATE.quiet or not graphs.session.enabled:
            return original(self, options, feed_dict, fetch_list, target_list, run_metadata)

        def call(fetches: Any, targets: Any) -> Any:
            return original(self, options, feed_dict, fetches, targets, run_metadata)

        return graphs.run(call, self, Request(feed_dict, fetch_list, target_list))

    return run


def _running_partially(original: Any) -> Any:
    @functools.wraps(original)
    def run_partially(self: Any, handle: Any, feed_dict: Any, fetch_list: Any) -> Any:
        graphs = STATE.graphs
        if graphs is None or STATE.quiet:
            return original(self, handle, feed_dict, fetch_list)
        call = functools.partial(original, self, handle, feed_dict)
        return graphs.run_partially(call, self, handle, Request(feed_dict, fetch_list, []))

    return run_partially


def _setting_up(original: Any) -> Any:
    @functools.wraps(original)
    def do_call(self: Any, fn: Any, *args: Any) -> Any:
        graphs = STATE.graphs
        if (
            fn.__name__ != SETUP_OF_PARTIAL_RUN
            or graphs is None
            or STATE.quiet
            or not graphs.session.enabled
        ):
            return original(self, fn, *args)
        owner, feeds, fetches, targets = args
        call = functools.partial(original, self, fn, owner, feeds)
        return graphs.set_up(call, self, Request(feeds, fetches, targets))

    return do_call
