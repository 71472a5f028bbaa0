"""`Regions`: distinguishing the occurrences of one call site that read several weights.

Owns which sites read parts of parameters, and a number for each part that a site reads. A loop over
experts, ``for e in hit: linear(x, w[e])``, has an op for each expert, whatever the routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from amanda_core.weights.geometry import extents_of
from amanda_core.weights.parameters import Found, Parameters

__all__ = ["LIMIT", "Regions", "SiteRegions"]

#: How many parts of parameters an operand of a site may have. Further ones share an id, so that a
#: window that slides along a parameter does not make endless ops.
LIMIT = 512


class SiteRegions:
    """The parts of parameters that one site in one scope reads.

    Args:
        parameters: Finds them.
        root: Label of the root that the site is part of.
    """

    def __init__(self, parameters: Parameters, root: str) -> None:
        self._parameters, self._root = parameters, root
        #: Operand -> the size of its parts, and each part seen -> its token. A loop does not run
        #: over parts of another size.
        self._seen: dict[int, tuple[tuple[int, ...], dict[tuple[int, str], int]]] = {}

    def look_up(self, position: int, value: Any) -> tuple[int, Found | None]:
        """Return the token of the part that an operand shows, and the part; 0 for none."""
        part = self._parameters.find(value, self._root, position > 0)
        if part is None:
            return 0, None
        own = extents_of(part.place.region, part.shape)
        extents, tokens = self._seen.setdefault(position, (own, {}))
        key = part.token, part.path
        if extents != own or (key not in tokens and len(tokens) >= LIMIT):
            return 0, None
        return tokens.setdefault(key, len(tokens) + 1), part


class Regions:
    """The sites that read parts of parameters. The values of other sites are not inspected.

    Args:
        parameters: Finds parameters; None if the driver cannot.
        tensor_types: Types of values that may show a part of a parameter.
    """

    def __init__(self, parameters: Parameters | None, tensor_types: frozenset[type]) -> None:
        self._parameters, self._tensor_types = parameters, tensor_types
        self._sites: dict[tuple[Any, ...], SiteRegions] = {}
        self._numbered: list[SiteRegions] = []

    def __bool__(self) -> bool:
        return bool(self._sites)

    def operands(
        self, site: tuple[Any, ...], values: Sequence[Any]
    ) -> Iterator[tuple[int, int, Found]]:
        """Yield the operands that show parts of parameters: position, negative token, the part."""
        regions = self._sites.get(site)
        for position, value in enumerate(values if regions is not None else ()):
            if regions is not None and type(value) in self._tensor_types:
                token, part = regions.look_up(position, value)
                if part is not None:
                    yield position, -token, part

    def token(self, number: int, position: int, value: Any) -> int:
        """Return the token of the part that an operand of a numbered site shows; 0 for none."""
        return self._numbered[number].look_up(position, value)[0]

    def note(self, site: tuple[Any, ...], root: str, values: Sequence[Any]) -> bool:
        """Register a site if one of its operands shows a part of a parameter.

        Args:
            site: The site, by its numbers.
            root: Label of the root that it is part of.
            values: The operands.
        """
        if self._parameters is None or site in self._sites:
            return False
        for position, value in enumerate(values):
            if type(value) in self._tensor_types and self._parameters.find(
                value, root, position > 0
            ):
                self._sites[site] = regions = SiteRegions(self._parameters, root)
                self._numbered.append(regions)
                return True
        return False

    def number(self, site: tuple[Any, ...]) -> int:
        """Return the number of a registered site."""
        return self._numbered.index(self._sites[site])
