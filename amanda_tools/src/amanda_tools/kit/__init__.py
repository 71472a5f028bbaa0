"""What authors of tools want: bases of tools, accounts of operators, weights, tables, pages.

All that is named here is public. It is imported from its module when it is first used, so that a
tool loads only what it needs.

>>> from amanda_tools.kit import format_count
>>> format_count(2, "step")
'2 steps'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_tools.kit.mapping import MappingTool
    from amanda_tools.kit.operators.clock import Clock
    from amanda_tools.kit.operators.entries import EitherWayOp, OpFacts, key_of, with_parents
    from amanda_tools.kit.operators.sums import Summed
    from amanda_tools.kit.operators.tool import OperatorTool, is_eager, runs_in_order
    from amanda_tools.kit.operators.weights import WeightKeys
    from amanda_tools.kit.output import charts
    from amanda_tools.kit.output.chrome import Span, TraceFile
    from amanda_tools.kit.output.extras import require
    from amanda_tools.kit.output.folders import create_folder, whole_file, write_text
    from amanda_tools.kit.output.rendering import (
        dataframe,
        describe_overhead,
        fields_of,
        format_count,
        format_percent,
        format_quantity,
        render_html,
        render_json,
    )
    from amanda_tools.kit.output.scalars import ScalarLog, scalars_of
    from amanda_tools.kit.page.composition import Parts, compose, part
    from amanda_tools.kit.page.libraries import library
    from amanda_tools.kit.sequences.places import Places
    from amanda_tools.kit.sequences.tool import SequenceTool
    from amanda_tools.kit.tensors.arithmetic import arithmetic_of
    from amanda_tools.kit.tensors.statistics import Statistics, statistics_of
    from amanda_tools.kit.tensors.types import (
        TensorType,
        describe_tensors,
        is_floating,
        is_real,
        size_of,
        type_of,
    )
    from amanda_tools.kit.tensors.values import HostTensor, facts_of, host, numbers, tensors_in
    from amanda_tools.kit.weights.copies import Copies
    from amanda_tools.kit.weights.coverage import UnreachedWeight, WeightCoverage
    from amanda_tools.kit.weights.files import load_weights, save_weights
    from amanda_tools.kit.weights.learned_parameters import OptimizerJoin
    from amanda_tools.kit.weights.tool import WeightTool
    from amanda_tools.kit.weights.writes import Watch

# Bases of tools, and accounts of operators.
__all__ = ["MappingTool", "OperatorTool", "SequenceTool", "WeightTool"]
__all__ += ["Clock", "EitherWayOp", "OpFacts", "Places", "Summed", "WeightKeys"]
__all__ += ["is_eager", "key_of", "runs_in_order", "with_parents"]
# Weights and tensors.
__all__ += ["Copies", "OptimizerJoin", "UnreachedWeight", "Watch", "WeightCoverage"]
__all__ += ["HostTensor", "Statistics", "TensorType", "arithmetic_of", "describe_tensors"]
__all__ += ["facts_of", "host", "is_floating", "is_real", "load_weights", "numbers"]
__all__ += ["save_weights", "size_of", "statistics_of", "tensors_in", "type_of"]
# Results and pages.
__all__ += ["Parts", "ScalarLog", "Span", "TraceFile", "charts", "compose", "create_folder"]
__all__ += ["dataframe", "describe_overhead", "fields_of", "format_count", "format_percent"]
__all__ += ["format_quantity", "library", "part", "render_html", "render_json", "require"]
__all__ += ["scalars_of", "whole_file", "write_text"]

#: Module -> the public names that it defines.
_NAMES = {
    "mapping": "MappingTool",
    "operators.clock": "Clock",
    "operators.entries": "EitherWayOp OpFacts key_of with_parents",
    "operators.sums": "Summed",
    "operators.tool": "OperatorTool is_eager runs_in_order",
    "operators.weights": "WeightKeys",
    "output.chrome": "Span TraceFile",
    "output.extras": "require",
    "output.folders": "create_folder whole_file write_text",
    "output.rendering": (
        "dataframe describe_overhead fields_of format_count format_percent format_quantity "
        "render_html render_json"
    ),
    "output.scalars": "ScalarLog scalars_of",
    "page.composition": "Parts compose part",
    "page.libraries": "library",
    "sequences.places": "Places",
    "sequences.tool": "SequenceTool",
    "tensors.arithmetic": "arithmetic_of",
    "tensors.statistics": "Statistics statistics_of",
    "tensors.types": "TensorType describe_tensors is_floating is_real size_of type_of",
    "tensors.values": "HostTensor facts_of host numbers tensors_in",
    "weights.copies": "Copies",
    "weights.coverage": "UnreachedWeight WeightCoverage",
    "weights.files": "load_weights save_weights",
    "weights.learned_parameters": "OptimizerJoin",
    "weights.tool": "WeightTool",
    "weights.writes": "Watch",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "charts":
            return importlib.import_module("amanda_tools.kit.output.charts")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
