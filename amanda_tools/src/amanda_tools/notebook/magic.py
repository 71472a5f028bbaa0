"""``%%amanda TOOL...``: run a cell under tools and show their results.

IPython calls `load_ipython_extension`, so it is there, and nothing here imports it before.
"""

from __future__ import annotations

import ast
import shlex
from typing import Any

from amanda_core.engine.activation import apply
from amanda_core.results import Result
from amanda_tools.kit.output.named_tools import named_tools, results_of
from amanda_tools.kit.output.rendering import render_result

__all__ = ["load_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Register the magic; `IPython` calls this for ``%load_ext amanda``."""

    def amanda(line: str, cell: str) -> Any:
        """Run the cell under tools: ``%%amanda flops latency:warmup=0``.

        The results are shown below the cell, and are in ``amanda_results`` by the tools' names.
        """
        tools = named_tools(shlex.split(line), "%%amanda")
        try:
            with apply(*tools.values()):
                return _run(shell, cell)
        finally:
            results = results_of(tools)
            shell.user_ns["amanda_results"] = results
            for name, result in results.items():
                _show(name, result)

    shell.register_magic_function(amanda, "cell", "amanda")


def _run(shell: Any, cell: str) -> Any:
    """Run a cell as IPython does, and return the value of its last expression."""
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source)
    tree = ast.parse(source, filename=name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), shell.user_ns)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    found = eval(compile(ast.Expression(last.value), name, "eval"), shell.user_ns)
    # As in IPython, a semicolon at the end hides the value.
    return None if source.rstrip().endswith(";") else found


def _show(name: str, result: Result) -> None:
    from IPython.display import display

    page = render_result(name, result)
    text = f"{name}: {result.table()}"
    display({"text/html": page, "text/plain": text}, raw=True)  # type: ignore[no-untyped-call]
