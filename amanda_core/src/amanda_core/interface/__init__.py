"""The contract of a driver: its hooks, data types, facts, vocabulary and namespaces.

This is the contract of the core and a backend. All names of it are found here; drivers import them
from here. `hookspecs` owns the hooks, `driver` the data types, `facts` what a driver tells tools
about tensors, `groups` how processes agree, `vocabulary` the common operator types, `namespace` the
namespaces. Their ``__all__`` name what is public, and this module adds the errors that drivers
raise.
"""

from __future__ import annotations

from amanda_core import errors
from amanda_core.errors import *
from amanda_core.interface import driver, facts, groups, hookspecs, namespace, vocabulary
from amanda_core.interface.driver import *
from amanda_core.interface.facts import *
from amanda_core.interface.groups import *
from amanda_core.interface.hookspecs import *
from amanda_core.interface.namespace import *
from amanda_core.interface.vocabulary import *

_MODULES = (driver, facts, groups, hookspecs, namespace, vocabulary)
__all__ = sorted({*errors.__all__, *(name for module in _MODULES for name in module.__all__)})
