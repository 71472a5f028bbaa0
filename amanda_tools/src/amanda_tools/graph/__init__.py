"""Graph of a program: operators, backward operators and the values between them."""

from amanda_tools.graph.files import from_json, load, to_json
from amanda_tools.graph.model import Edge, Graph, Module, Node, Op, Source
from amanda_tools.graph.result import GraphResult
from amanda_tools.graph.tracing import GraphTracing

__all__ = [
    "Edge",
    "Graph",
    "GraphResult",
    "GraphTracing",
    "Module",
    "Node",
    "Op",
    "Source",
    "from_json",
    "load",
    "to_json",
]
