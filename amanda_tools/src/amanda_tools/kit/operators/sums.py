"""Sums over operators: by type, by module and in total.

Defines these sums and their order for the tools that measure each operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from amanda_tools.kit.operators.entries import with_parents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import DataclassInstance

    class _Tally(DataclassInstance, Protocol):
        def add(self, op: Any) -> None: ...


__all__ = ["OUTSIDE", "Summed"]

#: Name of the row for operators in no module, such as those of an optimizer.
OUTSIDE = "(no module)"

S = TypeVar("S", bound="_Tally")


class _Measured(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def module(self) -> str: ...


class Summed(Generic[S]):
    """Base of results whose operators can be summed.

    A subclass provides `ops`, sets `_sum` to the dataclass of a sum, which has ``add(op)``, and
    defines the order of the sums by type.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Calls:
    ...     calls: int = 0
    ...     def add(self, op):
    ...         self.calls += op.calls
    >>> class Result(Summed[Calls]):
    ...     _sum = Calls
    ...     def __init__(self, ops):
    ...         self.ops = ops
    ...     def _order(self, found):
    ...         return -found.calls
    >>> from types import SimpleNamespace
    >>> ops = [SimpleNamespace(kind="relu", module="encoder.0", calls=n) for n in (1, 2)]
    >>> Result(ops).by_module()
    {'': Calls(calls=3), 'encoder': Calls(calls=3), 'encoder.0': Calls(calls=3)}
    """

    ops: Sequence[Any]
    _sum: ClassVar[type[Any]]

    def _order(self, found: S) -> Any:
        """Return the key by which the sums by type are sorted."""
        raise NotImplementedError

    @property
    def total(self) -> S:
        """Return the sum over all operators."""
        return self._sum_of(self.ops)

    def by_type(self) -> dict[str, S]:
        """Return a sum for each operator type, the largest first.

        The key is the common type, or the framework's if there is none. A backward operator with an
        entry of its own counts under the type of its forward operator.
        """
        found: dict[str, S] = {}
        for op in self.ops:
            found.setdefault(op.kind, self._sum()).add(op)
        return dict(sorted(found.items(), key=lambda item: self._order(item[1])))

    def by_module(self) -> dict[str, S]:
        """Return a sum for each module path, including the modules inside it; ``""`` is the whole
        program.
        """
        found: dict[str, S] = {"": self._sum()}
        for op in self.ops:
            for path in with_parents(op.module):
                found.setdefault(path, self._sum()).add(op)
        return found

    def _sum_of(self, ops: Sequence[_Measured]) -> S:
        found: S = self._sum()
        for op in ops:
            found.add(op)
        return found

    def _sums(self, by: str, depth: int | None) -> dict[str, S] | None:
        """Return the sums for a table by ``type`` or by ``module`` up to a depth, or None for
        another `by`.

        Modules are followed by the operators that are in none, so that rows add up.
        """
        if by == "type":
            return self.by_type()
        if by != "module":
            return None
        sums = {
            path: found
            for path, found in self.by_module().items()
            if depth is None or len(with_parents(path)) - 1 <= depth
        }
        if len(sums) > 1:
            sums[OUTSIDE] = self._sum_of([op for op in self.ops if not op.module])
        return sums

    def _sums_as_json(self) -> dict[str, dict[str, S]]:
        return {"by_type": self.by_type(), "by_module": self.by_module()}
