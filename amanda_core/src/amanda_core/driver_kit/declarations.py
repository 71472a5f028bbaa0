"""What a driver declares in a table of its package, ``driver.toml``, and need not compute.

Owns the format of the table: what the driver is, the releases of its framework, the common
operator types of the framework's operators, the roles of their inputs, what the driver does not
instrument, and lists of names. Drivers import it; the engine does not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from amanda_core.interface.driver import CoverageGap, DriverInfo
from amanda_core.interface.vocabulary import OP_TYPES, backward_type_of

if TYPE_CHECKING:
    from amanda_core.engine.context import OpContext

__all__ = ["Declarations"]

#: The table in the package of a driver.
_FILE = "driver.toml"


class Declarations(Mapping[str, str]):
    """The table of a driver; as a mapping, a vocabulary: operator -> common operator type.

    An operator that is not in the table and that has the name of a common type has that type. Of
    the table, the first two parts are required::

        [driver]
        api = 2
        name = "myframework"
        modules = "myframework"

        [capabilities]  # of all modes, and what each has beside them
        all = "gradients replace"
        eager = "eager ordered"
        compiled = "graph"

        [framework]  # for `amanda_core.driver_kit.declared_hooks`
        name = "MyFramework"
        distributions = "myframework"  # that may hold it, if they do not have the modules' names
        oldest = "2.0"  # the oldest release that is supported, the newest one that was tried
        newest = "2.3.99"
        first = "2.2"  # the oldest release that was tried, if older ones are supported, too
        complete = "nn"  # what its module has once its import is done
        self_test = "amanda_driver_mine.self_test"  # run once for a release that was not tried
        interception = "Operators pass through MyFramework.call"

        [environment]  # variables without which results would be wrong, for `amanda run`
        MYFRAMEWORK_ENGINE = "exact"

        [types]  # common operator type = the framework's operators
        conv2d = "Convolution ConvolutionV1"
        sub = "minus"

        [roles]  # common types or the framework's operators = roles of the leading inputs
        "sub div" = "left right"

        [coverage]  # what is not instrumented = why
        "operators of the old API" = "they run in C"

        [names]  # lists for the driver's own use
        containers = "loop branch"

    Attributes:
        package: Name of the package that holds the table.
        info: The description of the driver, whose namespaces have the modes of its capabilities.
        framework: The part of that name.
        names: The lists of names.

    Args:
        package: Name of the package that holds the table.
        plain: Returns the name of an operator without the prefixes and suffixes that do not matter,
            for operators that are not in the table.
    """

    def __init__(self, package: str, plain: Callable[[str], str] = str) -> None:
        text = resources.files(package).joinpath(_FILE).read_text("utf-8")
        tables: dict[str, Any] = tomllib.loads(text)
        self.package, self._plain = package, plain
        driver: dict[str, Any] = tables["driver"]
        capabilities = {mode: set(own.split()) for mode, own in tables["capabilities"].items()}
        of_all = capabilities.pop("all", set())
        self.info = DriverInfo(
            api=driver["api"],
            name=driver["name"],
            modules=tuple(driver["modules"].split()),
            namespaces=tuple(f"{driver['name']}/*/{mode}" for mode in capabilities),
            capabilities={mode: frozenset(of_all | own) for mode, own in capabilities.items()},
            vocabulary=self,
            environment=tables.get("environment", {}),
        )
        self.framework: Mapping[str, str] = tables.get("framework", {})
        lists = tables.get("names", {})
        self.names = {key: tuple(names.split()) for key, names in lists.items()}
        self._types = _by_name(tables.get("types", {}).items())
        roles = ((roles, names) for names, roles in tables.get("roles", {}).items())
        self._roles = {name: tuple(found.split()) for name, found in _by_name(roles).items()}
        self._coverage = tables.get("coverage", {})

    def __getitem__(self, name: str) -> str:
        plain = name if name in self._types else self._plain(name)
        found = self._types.get(plain, plain)
        if found not in OP_TYPES:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def gaps(self) -> list[CoverageGap]:
        """Return what the driver does not instrument, and why, for `Attachment.coverage`."""
        return [CoverageGap(what, why) for what, why in self._coverage.items()]

    def describe(self, context: OpContext, common_type: str | None = "") -> str | None:
        """Set the types and roles in the context of an op; for a backward op its type.

        The roles are those of the operator, or of its common type. An operator that has a single
        input has none.

        Args:
            context: The context.
            common_type: The common type of an op, or None, if the table does not tell it.

        Returns:
            The common type of an op; None for a backward op.
        """
        if context.is_backward():
            forward: Any = None if context.forward is None else context.forward["type"]
            context["backward_type"] = None if forward is None else backward_type_of(forward)
            return None
        name = context.op_type
        found = context["type"] = self.get(name) if common_type == "" else common_type
        roles = self._roles.get(name) or self._roles.get(found or "")
        if roles is not None and len(context.get_inputs() or ()) > 1:
            context["input_roles"] = roles
        return found


def _by_name(rows: Any) -> dict[str, str]:
    """Return the first part of each row by the names in its second part."""
    return {name: key for key, names in rows for name in names.split()}
