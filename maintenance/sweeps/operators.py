"""Every operator of torch's own database on its own sample inputs, plain and instrumented.

Instrumented by routines that change nothing at every point, and by the shipped tools.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import amanda

from . import device, exceptions
from .identity import ROUTINES, Identity
from .observations import Facts, different, kind
from .programs import Program, Ran, programs
from .results import Failure, Part, versions
from .shipped import WAYS, applied, differing

VARIABLE = "AMANDA_TORCH_INTERCEPTOR"
#: Those that are tested. The variable also selects them in the processes that a sweep starts.
TESTED = "AMANDA_SWEEP_INTERCEPTORS"
INTERCEPTORS = tuple(os.environ.get(TESTED, "native,function_mode").split(","))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
#: Pattern of the error with which the driver refuses a point of an op.
REFUSED = (
    r"The gradients of these (inputs|outputs) (come from|go to) several backward ops of this op"
)
#: Number of runs under one `apply`: analysis first, then caching, then a run from the cache.
ITERATIONS = 3

Case = tuple[Any, torch.dtype]


def cases() -> list[Case]:
    """Return all operators of the database with each dtype that they support, in a fixed order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = "torch.testing._internal.common_methods_invocations"
        op_db = importlib.import_module(name).op_db
    return [
        (op, dtype)
        for op in sorted(op_db, key=lambda op: str(op.formatted_name))
        for dtype in DTYPES
        if dtype in op.supported_dtypes(device.name)
    ]


def name_of(case: Case) -> str:
    """Return the name of a case, such as `linalg_svd float32`; the variant comes after a dot."""
    op, dtype = case
    variant = f".{op.variant_test_name}" if op.variant_test_name else ""
    return f"{op.name}{variant} {str(dtype).removeprefix('torch.')}"


def chosen(every: list[Case], sample: int | None, seed: int, shard: tuple[int, int]) -> list[Case]:
    """Return the cases of one run: all or a random sample of fixed size, and of these a shard."""
    if sample is not None and sample < len(every):
        every = random.Random(seed).sample(every, sample)
    return every[shard[0] :: shard[1]]


def sweep(
    these: list[Case],
    *,
    seed: int = 0,
    inputs: int | None = None,
    interceptors: tuple[str, ...] = INTERCEPTORS,
    routines: tuple[str, ...] = tuple(ROUTINES),
    seconds: float | None = None,
    verbose: bool = False,
) -> Part:
    """Run the cases, with at most `inputs` sample inputs each.

    With `seconds`, no case starts after that time; the missing cases are counted.
    """
    part = Part("operators", versions=versions())
    start = time.monotonic()
    with quiet():
        for number, case in enumerate(these):
            if seconds is not None and time.monotonic() - start > seconds:
                part.counts["cases not reached"] += len(these) - number
                break
            if verbose:
                sys.stderr.write(f"{number}/{len(these)} {name_of(case)}\n")
            begin = len(part.failures)
            _case(part, case, seed, inputs, interceptors, routines)
            for failure in part.failures[begin:] if verbose else ():
                sys.stderr.write(f"  {failure}\n")
    return part


@contextmanager
def quiet() -> Iterator[None]:
    """Use one thread without warnings, and restore the choice of interceptor at the end."""
    threads, before = torch.get_num_threads(), os.environ.get(VARIABLE)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    if device.name != "cpu":
        # Kernels with atomic additions round in another order each time.
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Some models have weights that nobody has written.
        _fill_memory(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        _fill_memory(True)
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _fill_memory(filled: bool) -> None:
    """Choose whether deterministic algorithms fill memory that nobody has written with NaN."""
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = filled


def _samples(case: Case, seed: int, inputs: int | None) -> list[Any]:
    op, dtype = case
    torch.manual_seed(seed + zlib.crc32(name_of(case).encode()))
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes(device.name)
    found = list(op.sample_inputs(device.name, dtype, requires_grad=gradients))
    if inputs is not None and inputs < len(found):
        found = random.Random(seed).sample(found, inputs)
    return found


def _case(
    part: Part,
    case: Case,
    seed: int,
    inputs: int | None,
    interceptors: tuple[str, ...],
    routines: tuple[str, ...],
) -> None:
    name, (op, dtype) = name_of(case), case
    try:
        samples = _samples(case, seed, inputs)
    except Exception as error:
        part.left_out[name] = f"torch cannot make its sample inputs: {error}"
        return
    part.cases[name] += 0
    for number, sample in enumerate(samples):
        part.counts["sample inputs"] += 1
        for program in programs(op, sample, dtype):
            facts = _plain(program)
            if facts is None:
                unstable = exceptions.reason(op.name, program.form, "none", ["value"])
                reason = unstable or "two plain runs differ from one another"
                part.left_out[f"{name}, {program.form}"] = reason
                continue
            part.counts["programs"] += 1
            part.counts["programs that raise, plain and instrumented"] += bool(facts["error"])
            for interceptor in interceptors:
                os.environ[VARIABLE] = interceptor
                for routine in routines:
                    how = f"{program.form}, {interceptor}, {routine}"
                    _instrumented(part, name, how, f"input {number}", program, facts, routine)
                for way in WAYS:
                    how = f"{program.form}, {interceptor}, {way}"
                    _under_tools(part, name, how, f"input {number}", program, facts, way)


def _plain(program: Program) -> Facts | None:
    """Return the facts of a plain run, or None if another plain run differs."""
    if program.form == "out":
        # Create the tensors to write to like the result of the function.
        program.destinations = _destinations(program)
    first = program.run(program.inputs()).facts()
    second = program.run(program.inputs()).facts()
    return None if different(first, second, results_only=False) else first


def _unstable(program: Program, plain: Facts, names: list[str]) -> bool:
    """Return True if these facts also differ between many plain runs; two may agree by chance.

    The memory that the runs get is varied, because some results of LAPACK depend on it.
    """
    draw = random.Random(0)
    held: list[torch.Tensor] = []
    while program.repeated < 1000 and not program.varying.issuperset(names):
        program.repeated += 1
        held.append(torch.empty(draw.randrange(1, 64), dtype=torch.uint8))
        if len(held) > 250:
            del held[draw.randrange(250)]
        now = program.run(program.inputs()).facts()
        program.varying.update(different(plain, now, results_only=False))
    return program.varying.issuperset(names)


def _destinations(program: Program) -> Any:
    once = Program(program.op, program.sample, "function", False, False)
    result = once.run(once.inputs()).result
    return tree_map_only(torch.Tensor, lambda tensor: torch.zeros_like(tensor.detach()), result)


def _instrumented(
    part: Part, name: str, how: str, which: str, program: Program, plain: Facts, routine: str
) -> None:
    refused: set[tuple[str, str]] = set()
    while True:
        given = [program.inputs() for _ in range(ITERATIONS)]
        tool = Identity(ROUTINES[routine], refused)
        error = ""
        runs = []
        try:
            with amanda.apply(tool):
                runs = [program.run(inputs) for inputs in given]
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        refusal = next((found for found in map(_refusal, runs) if found), None)
        if refusal is None or refusal in refused:
            break
        # Refused with a named reason, so try the other points of this op.
        refused.add(refusal)
        part.refused[f"{refusal[0]}, gradients of {refusal[1]} together"] += 1
    part.counts["instrumented runs"] += len(runs)
    part.counts["routines called"] += tool.called
    part.counts["programs with no routine called"] += not tool.called and not plain["error"]
    for iteration, ran in enumerate(runs):
        part.cases[name] += 1
        facts = ran.facts()
        names = different(plain, facts, results_only=routine == "clones")
        if plain["error"] and routine == "clones":
            # How far a failing backward pass gets depends on its order.
            names = [name for name in names if not name.startswith(("second-order", "accumulated"))]
        if names:
            why = exceptions.reason(program.op.name, program.form, routine, names)
            if not why and _unstable(program, plain, names):
                why = exceptions.UNSTABLE
            if "error" in names:
                names.append(f"raised {facts['error']!r} for {plain['error']!r}")
            _fail(part, name, how, f"{which}, iteration {iteration}", names, why)
    if error:
        _fail(part, name, how, which, [f"leaving raised: {error}"], "")


def _under_tools(
    part: Part, name: str, how: str, which: str, program: Program, plain: Facts, way: str
) -> None:
    """Compare the last of several runs under shipped tools, when these act from their caches."""

    def run(tools: str) -> Facts:
        given = [program.inputs() for _ in range(ITERATIONS)]
        with applied(tools):
            runs = [program.run(inputs) for inputs in given]
        return runs[-1].facts()

    part.cases[name] += 1
    part.counts["runs under shipped tools"] += ITERATIONS
    names = differing(way, plain, run)
    if names and not _unstable(program, plain, names):
        differ = [name.rpartition(" alone: ")[2] for name in names]
        why = exceptions.reason(program.op.name, program.form, "none", differ)
        _fail(part, name, how, which, names, why)


def _refusal(ran: Ran) -> tuple[str, str] | None:
    """Return the type of the op whose gradients were refused, and whether of inputs or outputs."""
    found = re.match(rf"UnsupportedError: {REFUSED}.* op '(?:[^'/]*/)?([^'#]+)", ran.error)
    return (found[3], found[1]) if found else None


def _fail(part: Part, case: str, how: str, which: str, names: list[str], why: str) -> None:
    """Record a difference; the same difference for another input or iteration is only counted."""
    kinds = {kind(name) for name in names}
    for failure in part.failures:
        same = failure.case == case and failure.how.startswith(how + ";") and failure.reason == why
        if same and {kind(name) for name in failure.what} == kinds:
            failure.times += 1
            return
    part.failures.append(Failure(case, f"{how}; {which}", names, why))
