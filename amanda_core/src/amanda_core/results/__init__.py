"""Results of tools: protocols, tables and reading; the folder that they are written to.

`tables` is what authors of tools use, so its names are also found here. `output` and `folder_lock`
serve the command line.
"""

from __future__ import annotations

from amanda_core.results.tables import (
    LIMIT,
    ChangesWeights,
    HasFigures,
    HasOpFigures,
    HasResult,
    OpFigures,
    Result,
    Table,
    TakesOpFigures,
    load,
    printable,
    share,
)

__all__ = [
    "LIMIT",
    "ChangesWeights",
    "HasFigures",
    "HasOpFigures",
    "HasResult",
    "OpFigures",
    "Result",
    "Table",
    "TakesOpFigures",
    "load",
    "printable",
    "share",
]
