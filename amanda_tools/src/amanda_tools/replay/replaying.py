"""Execute one operator of a dump again, and compare what it returns with what was recorded.

The driver of the operator's framework executes it (`Facts.repeater`). What cannot be made again, or
depends on more than the record has, is refused by name.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

from amanda_core import Tool
from amanda_core.engine.activation import apply
from amanda_core.errors import ResultError
from amanda_core.interface.facts import Facts
from amanda_core.plugins.discovery import drivers
from amanda_core.runtime.threads import THREAD
from amanda_tools.diff.numbers import Tolerance, compare_tensors
from amanda_tools.dump.arguments import UnknownArgumentError, decoded
from amanda_tools.dump.files import Dumped, load_dump
from amanda_tools.dump.index import DumpedOp, DumpedTensor
from amanda_tools.kit.tensors.values import NotReadableError, host, need_numpy, tensors_in
from amanda_tools.replay.result import Replayed, ReplayResult

__all__ = ["replay"]

_AGAIN = "Record it with dump:calls=true, which keeps all that a call consists of"


def replay(
    path: Path | str,
    op: str,
    step: int = 0,
    execution: int | None = None,
    device: str = "",
    dtype: str | None = None,
) -> ReplayResult:
    """Execute one operator of a recorded run again, from its recorded inputs.

    Args:
        path: A dump that was recorded with ``dump:calls=true``, or the results of its run.
        op: Name of the operator.
        step: The step.
        execution: Number of earlier executions of the operator; the default is the first one in the
            step.
        device: Where to execute it, as the framework names the device; by default in main memory.
        dtype: Convert floating-point inputs to this dtype first.

    Raises:
        ValueError: The dump has no such operator or execution.
        ResultError: The record lacks something, the operator draws random numbers, or its framework
            cannot execute it again from a record.
        ImportError: The framework, or NumPy, is not installed.
    """
    need_numpy()
    dumped = load_dump(Path(path))
    number, tensors = _execution(dumped, op, step, execution)
    found = dumped.index.ops[number]
    where = f"op {found.name!r}, step {step}, execution {tensors[0].execution}"
    facts, version = _facts(found)
    result = ReplayResult(
        *(found.name, found.type, found.source, step, tensors[0].execution),
        *(found.namespace, version, device or "cpu", dtype),
    )
    framework, recorded, mode = found.namespace.split("/")
    if f"{framework}/{recorded}" != version:
        result.notes.append(f"It was recorded under {framework}/{recorded}; this is {version}.")
    if mode != "eager":
        result.notes.append(f"It was recorded in mode {mode!r}; here it runs on its own, eagerly.")
    try:
        _execute(dumped, number, tensors, facts, result)
    except (NotReadableError, UnknownArgumentError) as error:
        raise ResultError(
            f"The operator cannot be executed again: {error}",
            where=where,
            fix="Call it in a program of your own, with the values of the dump",
        ) from error
    return result


def _execution(
    dumped: Dumped, name: str, step: int, execution: int | None
) -> tuple[int, list[DumpedTensor]]:
    """Return the number of the operator and the tensors of the execution."""
    index = dumped.index
    numbers = [number for number, op in enumerate(index.ops) if op.name == name]
    if not numbers:
        near = difflib.get_close_matches(name, [op.name for op in index.ops], 3, 0.4)
        hint = f": did you mean {', '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"the dump has no operator {name!r}{hint}")
    there = [one for one in index.tensors if one.op in numbers and one.what == "output"]
    at = {(one.op, one.execution) for one in there if one.step == step}
    if execution is not None:
        at = {one for one in at if one[1] == execution}
    if not at:
        steps = ", ".join(map(str, sorted({one.step for one in there})[:20]))
        wanted = f"step {step}" + (f", execution {execution}" if execution is not None else "")
        has = f"it is recorded in steps {steps}" if steps else "it has no recorded outputs"
        raise ValueError(f"the dump has no outputs of {name!r} in {wanted}; {has}")
    chosen = min(at, key=lambda one: one[1])
    kinds = ("input", "weight", "output")
    return chosen[0], [
        one for one in index.tensors if (one.op, one.execution) == chosen and one.what in kinds
    ]


def _facts(op: DumpedOp) -> tuple[Facts, str]:
    """Return the facts of the driver of an operator's framework, and the name of what runs now."""
    framework = op.namespace.partition("/")[0]
    driver = next((one for one in drivers() if one.info.name == framework), None)
    if driver is None:
        raise ResultError(
            f"No driver of {framework} is installed, which executes its operators",
            where=f"op {op.name!r}",
            fix=f"Install the driver, or replay it where {framework} is",
        )
    module = importlib.import_module(driver.info.modules[0])
    with apply(Tool()):
        facts = THREAD.session.facts(op.namespace) if THREAD.session is not None else None
    if facts is None or facts.repeater is None:
        raise ResultError(
            f"The driver of {framework} does not execute recorded operators",
            where=f"op {op.name!r}",
            fix="Call it in a program of your own, with the values of the dump",
        )
    return facts, f"{framework}/{str(getattr(module, '__version__', '?')).partition('+')[0]}"


def _execute(
    dumped: Dumped, number: int, tensors: list[DumpedTensor], facts: Facts, result: ReplayResult
) -> None:
    """Execute the operator, and add what it returns to the result."""
    device = result.device
    if dumped.index.ops[number].word == "empty":
        raise NotReadableError("what it returns has no values yet")
    recorded = [
        one
        for one in dumped.index.arguments
        if one.op == number and one.execution <= result.execution
    ]
    if not recorded:
        raise NotReadableError(f"its arguments are not in the dump. {_AGAIN}")
    places = {one.position: one for one in tensors if one.what != "output"}
    arguments = recorded[-1].values

    def tensor(place: str, form: list[int]) -> Any:
        entry = places.get(place)
        if entry is None:
            raise NotReadableError(f"its input {place} is not in the dump. {_AGAIN}")
        values = dumped.read(entry)
        like = facts.repeater.empty(entry.shape, entry.dtype, device)
        made = facts.restore(values.array.copy(), like)
        if result.dtype is not None and entry.dtype.startswith(("float", "bfloat")):
            if facts.arithmetic is None:
                raise NotReadableError("its driver does not convert dtypes")
            made = facts.arithmetic.astype(made, result.dtype)
        return facts.repeater.formed(made, form) if form else made

    values = {
        name: decoded(value, tensor, facts.repeater.constant, name)
        for name, value in arguments.items()
    }
    before = dict(facts.random_states())
    outputs = facts.repeater.execute(result.type, values)
    if dict(facts.random_states()) != before:
        raise NotReadableError("it draws random numbers, whose state is not in the dump")
    now = {place: host(facts, value) for place, value in tensors_in(facts, outputs)}
    then = {one.position: one for one in tensors if one.what == "output"}
    if now.keys() != then.keys():
        raise NotReadableError(f"it returned {len(now)} tensors, of {len(then)} that are recorded")
    for place, entry in then.items():
        was, is_ = dumped.read(entry), now[place]
        result.outputs.append(
            Replayed(
                place,
                compare_tensors(was, is_, Tolerance(0.0, 0.0)),
                [entry.shape, list(is_.array.shape)],
                [was.dtype, is_.dtype],
            )
        )
        if was.dtype != is_.dtype and result.dtype is None:
            result.notes.append(
                f"Output {place} was {was.dtype}, which its inputs do not give: was it autocast?"
            )
