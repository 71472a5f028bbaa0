"""`MappingTool`: translate contexts between namespaces (paper, section 5.2 and listing 6).

Checks the rules and decides which of them apply in a namespace. What a rule writes is up to the
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.errors import MappingRuleError
from amanda_core.interface.namespace import matches

__all__ = ["MappingTool"]

Rule = Callable[[OpContext], Any]


class MappingTool(Tool):
    """Translates the contexts of a framework into a form that portable tools understand.

    Args:
        rules: Each is ``[namespace, before]`` or ``[namespace, before, after]``. `before` runs
            before the analysis of the tools that depend on this one, `after` runs after it; either
            may be None. The namespace is a prefix at ``/`` boundaries, such as ``pytorch``,
            ``tensorflow/2.21`` or ``*/*/eager``.

    Raises:
        MappingRuleError: A rule has another form.
        NamespaceError: A namespace pattern is malformed.

    >>> def torch_type(context):
    ...     context["op_name"] = context.get_op().__name__
    >>> tool = MappingTool(rules=[["pytorch", torch_type]])
    """

    changes_values = False

    def __init__(self, rules: Iterable[Sequence[Any]] = ()) -> None:
        super().__init__()
        self._rules: list[tuple[str, Rule | None, Rule | None]] = []
        #: Namespace -> the rules before and after in it.
        self._matching: dict[str, tuple[list[Rule], list[Rule]]] = {}
        for rule in rules:
            self.add_rule(*_checked(rule))
        self.add_context_rule(before=self._before, after=self._after)

    def add_rule(self, namespace: str, before: Rule | None, after: Rule | None = None) -> None:
        """Add a rule after the existing ones."""
        namespace, before, after = _checked((namespace, before, after))
        self._rules.append((namespace, before, after))
        self._matching.clear()
        self.invalidate()

    def _before(self, context: OpContext) -> None:
        for rule in self._rules_in(context.namespace)[0]:
            rule(context)

    def _after(self, context: OpContext) -> None:
        # In reverse order, so that the rules nest as the tools do.
        for rule in reversed(self._rules_in(context.namespace)[1]):
            rule(context)

    def _rules_in(self, namespace: str) -> tuple[list[Rule], list[Rule]]:
        found = self._matching.get(namespace)
        if found is None:
            rules = [rule for rule in self._rules if matches(rule[0], namespace)]
            found = self._matching[namespace] = (
                [before for _, before, _ in rules if before is not None],
                [after for _, _, after in rules if after is not None],
            )
        return found


def _checked(rule: Sequence[Any]) -> tuple[str, Rule | None, Rule | None]:
    fix = "Write [namespace, before] or [namespace, before, after]"
    if isinstance(rule, str) or not isinstance(rule, Sequence) or len(rule) not in (2, 3):
        raise MappingRuleError(f"{rule!r} is not a mapping rule", fix=fix)
    namespace, before, after = (*rule, None)[:3]
    if not isinstance(namespace, str):
        raise MappingRuleError(f"{namespace!r} is not a namespace", where=f"rule {rule!r}", fix=fix)
    for function in (before, after):
        if function is not None and not callable(function):
            raise MappingRuleError(
                f"{function!r} cannot be called", where=f"rule {rule!r}", fix=fix
            )
    matches(namespace, "any/any/any")  # Reject a malformed pattern now, not at the first op.
    return namespace, before, after
