"""Values that should be equal in the processes that train one model: where they are not."""

from amanda_tools.replicas.result import ReplicasReport, ReplicasResult, Violation
from amanda_tools.replicas.tool import Replicas
from amanda_tools.replicas.verdict import compare_replicas

__all__ = ["Replicas", "ReplicasReport", "ReplicasResult", "Violation", "compare_replicas"]
