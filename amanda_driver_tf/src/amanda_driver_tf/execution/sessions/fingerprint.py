"""Fingerprints that are equal for GraphDefs that differ only in generated names.

The names of library functions and the tokens of Python functions contain counters of the process.
They are replaced by numbers, in the order in which a traversal from the nodes finds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from tensorflow.core.framework import graph_pb2

__all__ = ["fingerprint"]


def fingerprint(graph_def: Any, sources: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the fingerprint of a GraphDef, and its tokens in order of traversal.

    Args:
        graph_def: The GraphDef, with all functions that it runs and that are its own.
        sources: The values it reads of the target graph, by the names it uses.
    """
    blank = graph_pb2.GraphDef()
    blank.CopyFrom(graph_def)
    anonymous = _Anonymous(
        {function.signature.name: function for function in blank.library.function}
    )
    anonymous.make(blank.node)
    del blank.library.function[:]
    digest = hashlib.blake2b(blank.SerializeToString(deterministic=True))
    # Functions that these call are appended on the way.
    for function in anonymous.found:
        anonymous.make(function.node_def)
        function.signature.name = ""
        digest.update(function.SerializeToString(deterministic=True))
    for name, source in sources.items():
        digest.update(f"{name} {source}\n".encode())
    return digest.digest(), anonymous.tokens


class _Anonymous:
    """Replaces generated names and tokens.

    Attributes:
        found: The functions found, in order.
        tokens: The tokens found, in order.
    """

    def __init__(self, library: Mapping[str, Any]) -> None:
        self._library, self._numbers = library, dict[str, int]()
        self.found: list[Any] = []
        self.tokens: list[str] = []

    def make(self, nodes: Iterable[Any]) -> None:
        """Replace the names and tokens of nodes."""
        for node in nodes:
            if node.op == "EagerPyFunc":
                self.tokens.append(node.attr["token"].s.decode())
                node.attr["token"].s = b""
            for key in sorted(node.attr):
                value = node.attr[key]
                for called in [value.func] if value.HasField("func") else value.list.func:
                    if called.name in self._library:
                        called.name = str(self._number(called.name))

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.found)
            self.found.append(self._library[name])
        return self._numbers[name]
