"""The zone of a call: which part of a program runs that is not the model, such as an optimizer.

Owns the search for frameworks whose parts are told apart by their names, and how a thread enters
a zone. Drivers import it; the engine does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

from amanda_core.modules.scopes import OUTSIDE, Activation, Scope, Scopes
from amanda_core.runtime.threads import THREAD

__all__ = ["enter_zone", "named_zone", "zone_of"]


def enter_zone(
    zone: str,
    scopes: Scopes,
    activations: list[Activation],
    make: Callable[[Scope, Activation | None], Activation] | None = None,
) -> Callable[[], None]:
    """Let the operators of a thread belong to a zone; return a function that ends this.

    Args:
        zone: The zone.
        scopes: The scopes of the thread's modules.
        activations: The calls of modules that are running there, outermost first.
        make: Makes the activation of a scope inside another activation; None for the core's own.
    """
    around = activations[-1] if activations else None
    place = around.scope if around is not None else OUTSIDE
    if place.zone == zone:
        return lambda: None
    scope = scopes.zoned(place, zone)
    activation = make(scope, around) if make is not None else Activation(scope)

    def leave() -> None:
        # Tools may have been removed inside, or zones left in another order.
        for index in range(len(activations) - 1, -1, -1):
            if activations[index] is activation:
                del activations[index]
                return

    try:
        activations.append(activation)
        return leave
    except BaseException:  # Nobody else can end it.
        leave()
        raise


def named_zone(zones: Mapping[str, str], module: str, function: str) -> str:
    """Return the zone of a function of a library, or an empty string.

    Args:
        zones: What a dotted name starts with -> the zone of all that it calls. The longest counts.
        module: The name of the module of the function.
        function: Its name.
    """
    name = f"{module}.{function}"
    if not name.startswith(tuple(zones)):
        return ""
    return zones[max((start for start in zones if name.startswith(start)), key=len)]


def zone_of(zones: Mapping[str, str], boundary: CodeType | None = None) -> str:
    """Return which part of a program runs: what the program has marked, or else by the functions
    around its caller.

    Args:
        zones: What the dotted name of a function starts with -> the zone of all that it calls.
        boundary: Code at which the search ends, such as that of the call of a module.
    """
    if THREAD.zones:
        return THREAD.zones[-1].name
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not boundary:
        module = str(frame.f_globals.get("__name__", ""))
        if zone := named_zone(zones, module, frame.f_code.co_name):
            return zone
        frame = frame.f_back
    return "model"
