"""Rewriting: replace subgraphs that match a pattern."""

from amanda_tools.rewriting.attention import attention
from amanda_tools.rewriting.patterns import Input, Operator
from amanda_tools.rewriting.result import RewriteResult, Rewritten
from amanda_tools.rewriting.rules import RULES, Matched, Rule
from amanda_tools.rewriting.tool import Rewrite

__all__ = [
    "RULES",
    "Input",
    "Matched",
    "Operator",
    "Rewrite",
    "RewriteResult",
    "Rewritten",
    "Rule",
    "attention",
]
