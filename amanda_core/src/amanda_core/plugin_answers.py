"""Checks of the descriptions that drivers give of themselves.

Owns the form that a `DriverInfo` must have. Python does not check types, and a malformed
description would cause an error far from the plugin that returned it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from amanda_core.driver import DRIVER_API, DriverInfo
from amanda_core.errors import DriverError

__all__ = ["TOGETHER", "check_info"]

#: What to do if a driver and the core do not fit together.
TOGETHER = "Install versions of amanda-core and of the driver that belong together"


def check_info(info: Any, what: str) -> DriverInfo:
    """Return a driver's description if it is well formed and for this core's interface.

    Args:
        info: The driver's answer.
        what: The driver, for messages.

    Raises:
        DriverError: It is malformed, or for another interface.
    """
    if info is None:
        raise DriverError(f"{what} does not describe itself", fix="Implement amanda_driver_info")
    # This comes first, because a description for another interface may have another form.
    api = getattr(info, "api", None)
    if type(api) is int and api != DRIVER_API:
        raise DriverError(
            f"{what} has driver API {api}, but this core has {DRIVER_API}", fix=TOGETHER
        )
    if not isinstance(info, DriverInfo):
        raise _malformed(what, f"a {type(info).__name__} and not a DriverInfo")
    for field, is_right, form in (
        ("api", type(api) is int, "a whole number"),
        ("name", _is_name(info.name), "a text without '/'"),
        ("modules", _are_texts(info.modules), "a tuple of texts"),
        ("namespaces", _are_texts(info.namespaces), "a tuple of texts"),
        ("capabilities", _are_capabilities(info.capabilities), "a frozenset of texts, or by mode"),
        ("vocabulary", _is_vocabulary(info.vocabulary), "a mapping of texts to texts"),
    ):
        if not is_right:
            raise _malformed(what, f"with {field}={getattr(info, field)!r:.80}, not {form}")
    return info


def _malformed(what: str, how: str) -> DriverError:
    return DriverError(f"{what} describes itself by {how}", fix="Correct its amanda_driver_info")


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "/" not in name


def _are_texts(value: Any, *kinds: type[Collection[Any]]) -> bool:
    # A single text would pass as a sequence of its letters.
    return isinstance(value, kinds or (tuple, list)) and all(isinstance(x, str) for x in value)


def _are_capabilities(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _are_texts([*value]) and all(_are_texts(v, frozenset) for v in value.values())
    return _are_texts(value, frozenset)


def _is_vocabulary(value: Any) -> bool:
    return isinstance(value, Mapping) and _are_texts([*value, *value.values()])
