"""Check whether each exception of the sweep is still needed; an unneeded one could hide something.

Each is tried where it is listed: that of an operator on all inputs of the operator, an op that
models leave alone in models until one differs, and one of a program in that program.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import os
import random

import amanda

from . import exceptions, foreign, models, operators
from .foreign_programs import PROGRAMS
from .identity import Identity, clones
from .model_list import MODELS
from .observations import different
from .operators import INTERCEPTORS, VARIABLE, quiet
from .results import Failure, Part, versions

#: Number of models that are tried for each op that they leave alone.
TRIED = 25


def sweep(only: str | None, seed: int) -> Part:
    """Try the exceptions whose names contain `only`."""
    part = Part("exceptions", versions=versions())
    found: dict[str, bool] = {}
    with quiet():
        os.environ[VARIABLE] = INTERCEPTORS[0]
        for excepted in exceptions.EXCEPTED:
            name = f"operator {excepted.op}: {excepted.reason.split(':')[0]}"
            if excepted.is_of_this_release and (only is None or only in name):
                found[name] = _operator(excepted, seed)
        for op_type in models.LEFT_ALONE:
            name = f"models: {op_type}"
            if only is None or only in name:
                found[name] = _models(op_type, seed)
        for program in PROGRAMS.values():
            for op_type in program.left_alone:
                name = f"program {program.name}: {op_type}"
                if only is not None and only not in name:
                    continue
                if program.processes > 1 or not all(map(importlib.util.find_spec, program.needs)):
                    part.left_out[name] = "it runs in several processes, or on what is not here"
                else:
                    found[name] = _program(program, op_type)
    for name, needed in found.items():
        part.cases[name] += 1
        if not needed:
            part.failures.append(Failure(name, "", ["stale: nothing needs it any more"]))
    return part


def _operator(excepted: exceptions.Excepted, seed: int) -> bool:
    these = [case for case in operators.cases() if fnmatch.fnmatch(case[0].name, excepted.op)]
    part = operators.sweep(these, seed=seed, interceptors=INTERCEPTORS[:1])
    os.environ[VARIABLE] = INTERCEPTORS[0]
    reasons = [*(failure.reason for failure in part.failures), *part.left_out.values()]
    return excepted.reason in reasons


def _models(op_type: str, seed: int) -> bool:
    every = [(name, task) for task, names in MODELS.items() for name in names]
    others = [other for other in models.LEFT_ALONE if other != op_type]
    for name, task in random.Random(seed).sample(every, TRIED):
        plain = models.run(name, task, amanda.disabled())
        tool = Identity(clones, left_alone=others)
        if different(plain, models.run(name, task, amanda.apply(tool)), results_only=False):
            return True
    return False


def _program(program: foreign.Program, op_type: str) -> bool:
    others = {other: why for other, why in program.left_alone.items() if other != op_type}
    program = dataclasses.replace(program, left_alone=others)
    plain, copied = (foreign.run(program, how).facts for how in ("plain", "clones"))
    return bool(different(plain, copied, results_only=True))
