"""Building blocks of drivers: sessions, execution, patching, identity, weights, versions.

All names that authors of drivers import beside those of `amanda_core.interface` are found here,
from whichever room of the core they come. What two drivers need stands in the core; what one driver
needs stands in that driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_core.driver_kit.declarations import *
    from amanda_core.driver_kit.declared_hooks import *
    from amanda_core.driver_kit.eager_programs import *
    from amanda_core.driver_kit.execution import *
    from amanda_core.driver_kit.frame_locals import *
    from amanda_core.driver_kit.framework_versions import *
    from amanda_core.driver_kit.interceptors import *
    from amanda_core.driver_kit.marks import *
    from amanda_core.driver_kit.model_files import *
    from amanda_core.driver_kit.model_writers import *
    from amanda_core.driver_kit.module_values import *
    from amanda_core.driver_kit.patching import *
    from amanda_core.driver_kit.recording import *
    from amanda_core.driver_kit.repeating import *
    from amanda_core.driver_kit.self_test_tools import *
    from amanda_core.driver_kit.zones import *
    from amanda_core.engine.action import *
    from amanda_core.engine.activation import *
    from amanda_core.engine.calls import *
    from amanda_core.engine.context import *
    from amanda_core.engine.plan import *
    from amanda_core.engine.session import *
    from amanda_core.engine.stacks import *
    from amanda_core.engine.tool import *
    from amanda_core.identity.identity import *
    from amanda_core.identity.sites import *
    from amanda_core.modules.module_paths import *
    from amanda_core.modules.scopes import *
    from amanda_core.plugins.discovery import *
    from amanda_core.plugins.driver_failures import *
    from amanda_core.plugins.imports import *
    from amanda_core.runtime.parting import *
    from amanda_core.runtime.switches import *
    from amanda_core.runtime.threads import *
    from amanda_core.runtime.warning_locations import *
    from amanda_core.runtime.weak import *
    from amanda_core.weights.contractions import *
    from amanda_core.weights.geometry import *
    from amanda_core.weights.parameters import *
    from amanda_core.weights.reads import *
    from amanda_core.weights.state import *

#: Module of the core -> the names that authors of drivers import. A module is loaded when one of
#: its names is first used: a program that only imports `amanda` needs few of them.
NAMES = {
    "driver_kit.declarations": ("Declarations",),
    "driver_kit.declared_hooks": ("DeclaredHooks",),
    "driver_kit.eager_programs": (
        "EagerExecution",
        "EagerNames",
        "EagerProgram",
        "Gates",
        "OpCall",
        "kind_by",
    ),
    "driver_kit.execution": (
        "BackwardOp",
        "BackwardProgram",
        "ForwardProgram",
        "OpRecord",
        "Run",
        "at",
        "backward_plans",
        "deferring",
        "several",
        "spread",
        "wants_gradients",
    ),
    "driver_kit.frame_locals": ("is_method", "local_of", "methods_around"),
    "driver_kit.framework_versions": ("FrameworkVersions",),
    "driver_kit.interceptors": ("Choice", "Extension", "Interceptors", "NATIVE", "load_extension"),
    "driver_kit.marks": ("Marks",),
    "driver_kit.model_files": ("ModelFile",),
    "driver_kit.model_writers": ("ModelWriters",),
    "driver_kit.module_values": ("arrays_in", "replace_first"),
    "driver_kit.patching": ("Patch", "Patches", "Routes", "made_once", "replacing"),
    "driver_kit.recording": ("Keeper", "Recorder"),
    "driver_kit.repeating": ("Repeater",),
    "driver_kit.self_test_tools": (
        "Watching",
        "applied",
        "doubling",
        "require",
        "require_seen",
    ),
    "driver_kit.zones": ("enter_zone", "named_zone", "zone_of"),
    "engine.action": ("Action", "ActionKind", "Positions", "Routine", "staged"),
    "engine.activation": ("apply", "attach"),
    "engine.calls": ("Call", "MODULE_INPUT", "MODULE_OUTPUT"),
    "engine.context": ("OpContext",),
    "engine.plan": ("EMPTY", "Plan", "Step"),
    "engine.session": ("COMPILED_CALL", "COMPILED_KERNEL", "TRANSFORMED", "Session"),
    "engine.stacks": ("is_started_by_python", "join"),
    "engine.tool": ("Tool",),
    "identity.identity": ("call_offset", "call_offsets", "stable_id"),
    "identity.sites": (
        "Code",
        "FRAMES",
        "FRAMEWORK",
        "Frames",
        "Group",
        "Level",
        "OCCURRENCES",
        "OWN",
        "Operands",
        "Origin",
        "QUIET",
        "Rules",
        "STOP",
        "Sites",
        "ThreadPlace",
        "USER",
        "distinguishes",
    ),
    "modules.module_paths": ("inside", "modules_of"),
    "modules.scopes": ("Activation", "Labels", "OUTSIDE", "Scope", "Scopes"),
    "plugins.discovery": ("register", "unregister"),
    "plugins.driver_failures": ("DriverFailures", "OriginalCall"),
    "plugins.imports": ("EndOfImport", "ImportWatcher", "running_imports"),
    "runtime.switches": (
        "CACHING",
        "ENABLED",
        "EPOCH",
        "LAYOUT_VERSION",
        "ROUTINE_DEPTH",
        "VERSION",
        "new_switches",
    ),
    "runtime.threads": (
        "Control",
        "THREAD",
        "WeakGroup",
        "inside_routine",
        "original",
        "standing_for",
    ),
    "runtime.warning_locations": ("warn",),
    "runtime.weak": (
        "Known",
        "Ref",
        "WeakValue",
        "Witness",
        "add_holder",
        "let_go",
        "only",
        "strongly",
        "weakly",
    ),
    "weights.contractions": (
        "contraction_of_axes",
        "contraction_of_equation",
        "contraction_of_matmul",
    ),
    "weights.geometry": (
        "Memory",
        "Place",
        "Region",
        "contiguous",
        "extents_of",
        "place_in",
        "region_text",
    ),
    "weights.parameters": ("Found", "Layouts", "Parameters"),
    "weights.reads": ("Reads", "Weight"),
    "runtime.parting": ("part",),
    "weights.state": ("Memoized", "WeightState", "forget_all_edited"),
}
_MODULES = {name: module for module, names in NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"amanda_core.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
