"""Training within a memory budget."""

from amanda_tools.rematerialize.result import RematerializedOp, RematerializeResult
from amanda_tools.rematerialize.tool import Rematerialize

__all__ = ["Rematerialize", "RematerializeResult", "RematerializedOp"]
