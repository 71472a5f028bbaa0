"""The code that Inductor generates: its calls of kernels, and functions with clocks around these.

Owns every private name of Inductor that timing kernels needs, and the form of its generated Python.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from amanda_driver_torch.torch_internals.dynamo import backend_itself, tree_leaves, uncached

__all__ = ["Half", "KernelCall", "compile_in_halves", "makes_kernels"]

#: What precedes a call of a kernel: its name and number, of which there may be several.
_HANDLE = re.compile(r"([\w.]+:\d+)")
_HANDLES = "[Provenance debug handles]"
_ENTRY = "call"
_TIMES, _RESULT = "_amanda_t", "_amanda_result"


@dataclass
class KernelCall:
    """A call of a kernel in generated code.

    Attributes:
        name: Name of the kernel, such as ``cpp_fused_gelu_0`` or ``extern_kernels.addmm``.
        nodes: Names of the nodes of Dynamo's graph that it computes, or parts of them, or whose
            gradients.
    """

    name: str
    nodes: list[str] = field(default_factory=list)


class Half:
    """The forward or the backward program of a graph, as Inductor has compiled it.

    Attributes:
        is_backward: True for the backward program.
        calls: The calls of kernels, in the order of the code.
    """

    def __init__(
        self, output: Any, is_backward: bool, nodes_of: Callable[[str], list[str]]
    ) -> None:
        self._output, self.is_backward, self._nodes_of = output, is_backward, nodes_of
        self.calls: list[KernelCall] = []
        self._places: list[ast.stmt] = []
        self._function: ast.FunctionDef | None = None

    def find_calls(self) -> str:
        """Find the calls of kernels in the generated code; return why these are not known, or an
        empty string.
        """
        runner = getattr(self._output, "current_callable", None)
        source = getattr(self._output, "source_code", None)
        if not (isinstance(runner, types.MethodType) and isinstance(source, str)):
            return "the compiler has generated no Python code, or records it in a CUDA graph"
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:
            return "the compiler has generated code in another language than Python"
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        entries = [function for function in functions if function.name == _ENTRY]
        if len(entries) != 1 or runner.__func__.__name__ != _ENTRY:
            return "the generated code has another form than that of the releases that were tried"
        (self._function,) = entries
        lines = source.splitlines()
        held = json.loads(self._output.inductor_provenance_mapping_str or "{}")
        parts: dict[str, list[str]] = held.get("cppCodeToPost", {})
        for statement in _statements(self._function.body):
            handles = _handles_before(lines, statement.lineno - 1)
            if handles:
                found = [name for handle in handles for name in parts.get(handle, ())]
                computed = [node for part in found for node in self._nodes_of(part)]
                names = (handle.rpartition(":")[0].removeprefix("torch.ops.") for handle in handles)
                name = " + ".join(names)
                self.calls.append(KernelCall(name, list(dict.fromkeys(computed))))
                self._places.append(statement)
        return ""

    def replace(
        self,
        before: Sequence[Callable[[], object] | None],
        after: Sequence[Callable[[], object] | None],
        clock: Callable[[], int],
        note: Callable[[tuple[int, ...]], object],
    ) -> None:
        """Let the program read a clock around itself and around its calls of kernels.

        Args:
            before: For the whole program, and then for each call of a kernel, a function to call
                instead of reading the clock before it, or None.
            after: The same after it.
            clock: Returns the time.
            note: Gets the times that were read: at the start, around each call, and at the end.
        """
        if self._function is None:
            self._output.current_callable = _around(
                self._output.current_callable, before[0], after[0], clock, note
            )
            return
        runner = self._output.current_callable
        names: dict[str, Any] = {**runner.__func__.__globals__, f"{_TIMES}now": clock}
        names[f"{_TIMES}note"] = note
        times: list[str] = []

        def read(instead: Callable[[], object] | None) -> str:
            number = len(times)
            if instead is not None:
                names[f"{_TIMES}call{number}"] = instead
            times.append(f"{_TIMES}{number}")
            call = "now" if instead is None else f"call{number}"
            return f"{times[-1]} = {_TIMES}{call}()"

        first = _parsed(read(before[0]))
        around = {}
        for place, one, other in zip(self._places, before[1:], after[1:], strict=True):
            around[id(place)] = _parsed(read(one)), _parsed(read(other))
        last = read(after[0])

        class Writing(ast.NodeTransformer):
            def generic_visit(self, node: ast.AST) -> Any:
                if id(node) in around:
                    start, end = around[id(node)]
                    return [*start, node, *end]
                return super().generic_visit(node)

            def visit_Return(self, node: ast.Return) -> Any:
                given = ast.copy_location(
                    ast.Assign([ast.Name(_RESULT, ast.Store())], node.value or ast.Constant(None)),
                    node,
                )
                rest = f"{last}; {_TIMES}note(({', '.join(times)},)); return {_RESULT}"
                return [given, *_parsed(f"def f():\n {rest}")[0].body]  # type: ignore[attr-defined]

        function = Writing().visit(self._function)
        function.body[:0] = first
        module = ast.fix_missing_locations(ast.Module([function], type_ignores=[]))
        exec(compile(module, runner.__func__.__code__.co_filename, "exec"), names)
        self._output.current_callable = types.MethodType(names[_ENTRY], runner.__self__)


def makes_kernels(backend: Any, inputs: Sequence[Any]) -> bool:
    """Return True if a backend is Inductor, and compiles for the CPU alone."""
    kind = getattr(torch, "_TorchCompileInductorWrapper", None)
    if kind is None or type(backend_itself(backend)) is not kind:
        return False
    try:
        from torch._inductor.compile_fx import compile_fx_inner  # noqa: F401
    except ImportError:
        return False
    tensors = [one for one in tree_leaves(list(inputs)) if isinstance(one, torch.Tensor)]
    # On other devices a call only starts a kernel.
    return all(tensor.device.type == "cpu" for tensor in tensors)


def compile_in_halves(
    backend: Any, graph: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], list[Half]]:
    """Compile a graph by Inductor, which notes what its kernels compute.

    Args:
        backend: The backend, for which `makes_kernels` is true.
        graph: Dynamo's graph.
        inputs: Its inputs.

    Returns:
        The compiled function, and its forward and backward programs.
    """
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    halves: list[Half] = []
    #: Number that the forward operators and their gradients share -> nodes of Dynamo's graph.
    by_number: dict[int, list[str]] = {}
    known = {node.name for node in graph.graph.nodes}

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        is_backward = bool(more.get("is_backward"))
        parts: dict[str, list[str]] = {}

        def note_parts() -> None:
            for node in gm.graph.nodes:
                sources = [one.name for one in node.meta.get("from_node", ()) if one.name in known]
                number = node.meta.get("seq_nr", -1)
                if is_backward:
                    sources = sources or by_number.get(number, [])
                elif sources and number >= 0:
                    by_number.setdefault(number, []).extend(sources)
                if sources:
                    parts[node.name] = sources

        note_parts()
        output = compile_fx_inner(gm, example_inputs, **more)
        note_parts()  # Of the graph from which the code was generated.
        halves.append(Half(output, is_backward, lambda name: parts.get(name, [])))
        return output

    settings = dict(getattr(backend_itself(backend), "config", {}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(uncached())
        level = {"trace.provenance_tracking_level": 1}
        stack.enter_context(torch._inductor.config.patch(level))
        compiled: Any = compile_fx(graph, inputs, inner_compile=inner, config_patches=settings)
    return compiled, halves


def _handles_before(lines: Sequence[str], index: int) -> list[str]:
    """Return the handles in the comments directly before a line."""
    while index and (line := lines[index - 1].strip()).startswith("#"):
        if _HANDLES in line:
            return _HANDLE.findall(line.partition(_HANDLES)[2])
        index -= 1
    return []


def _statements(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body that contain no others, in order."""
    found: list[ast.stmt] = []
    for statement in body:
        inside = [one for name in ("body", "orelse") for one in getattr(statement, name, ())]
        found += _statements(inside) if inside else [statement]
    return found


def _parsed(code: str) -> list[ast.stmt]:
    return ast.parse(code).body


def _around(
    run: Callable[..., Any],
    before: Callable[[], object] | None,
    after: Callable[[], object] | None,
    clock: Callable[[], int],
    note: Callable[[tuple[int, ...]], object],
) -> Callable[..., Any]:
    def timed(inputs: Any) -> Any:
        times = [(before or clock)()]
        result = run(inputs)
        times.append((after or clock)())
        note(tuple(times))  # type: ignore[arg-type]
        return result

    return timed
