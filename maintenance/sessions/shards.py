"""The tests in shards, each in processes of its own, and the tiers that their marks make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import nox

from .environments import APART, ROOT, environment, programs_of

__all__ = [
    "ALL",
    "EVERY",
    "EXHAUSTIVE",
    "FAST",
    "NATIVE",
    "NIGHTLY",
    "PURE",
    "PURE_DRIVER",
    "REST",
    "SHARDS",
    "SLOW",
    "USUAL",
    "Shard",
    "measure_coverage",
    "test",
    "test_apart",
]

# The tiers of tests, by their marks. `one_interceptor` marks what cannot depend on the torch
# interceptor; the native one runs it.
FAST = "not slow and not exhaustive"
SLOW = "slow and not exhaustive"
ALL = "not exhaustive"
EXHAUSTIVE = "exhaustive"
EVERY = ""
FUNCTION_MODE = {"AMANDA_TORCH_INTERCEPTOR": "function_mode"}

# The exit status of pytest if it collects nothing.
NO_TESTS = 5


class Shard(NamedTuple):
    """Tests that run in processes of their own."""

    paths: Sequence[str]
    #: Whether these are the tests that load TensorFlow. A process that has loaded it never forks.
    tensorflow: bool = False
    env: Mapping[str, str] = {}
    #: The environment of its own that these tests run in.
    apart: str = ""
    #: Which of the tests that a session runs are in it, as an expression of marks.
    marks: str = ""


#: Every test under the native interceptor, and again in pure Python: the tests of PyTorch's
#: driver, and those of the tools on it.
NATIVE = [Shard([]), Shard([], tensorflow=True)]
PURE_DRIVER = Shard(["amanda_driver_torch"], env=FUNCTION_MODE)
PURE = Shard(["amanda_driver_torch", "tests"], env=FUNCTION_MODE)
#: What the fast tests of `NATIVE` and `PURE_DRIVER` leave: what CI runs, and what takes too long
#: for it.
REST = [NATIVE[0]._replace(marks="slow")]
NIGHTLY = [
    *(shard._replace(marks="slow") for shard in (NATIVE[1], PURE_DRIVER)),
    Shard(["tests"], env=FUNCTION_MODE),
]
#: The same by name, for `nox -s tests_all -- NAME...`.
SHARDS = {
    "core": Shard(["amanda_core", "amanda_tools"]),
    "torch": Shard(["amanda_driver_torch"]),
    "torch-tools": Shard(["tests"]),
    "torch-function-mode": PURE,
    "tf-eager": Shard(["amanda_driver_tf/tests/eager", "amanda_driver_tf/tests/test_*.py"], True),
    "tf-functions": Shard(["amanda_driver_tf/tests/function"], True),
    "tf-graphs": Shard(["amanda_driver_tf/tests/graph"], True),
    "portable": Shard(["tests/portable"], True),
    "onnxruntime": Shard(["amanda_driver_onnxruntime"]),
    "jax": Shard(["amanda_driver_jax/tests"], apart="amanda_driver_jax"),
    "mindspore": Shard(["amanda_driver_mindspore/tests"], apart="amanda_driver_mindspore"),
    "mxnet": Shard(["amanda_driver_mxnet/tests"], apart="amanda_driver_mxnet"),
}
#: Those that do not need a large environment of their own.
USUAL = [name for name, one in SHARDS.items() if not one.apart or not APART[one.apart].large]


def test(
    session: nox.Session, shards: Sequence[Shard], marks: str, *arguments: str, **env: str
) -> None:
    """Run the tests of `shards` that have `marks`, one process for each core.

    The root folders are named like the packages inside them and would import as empty namespaces.
    The pytest program does not put the current folder on sys.path; PYTHONSAFEPATH (`python -P`,
    from 3.11 on) tells the programs that the tests start not to do so either. Bytecode is kept even
    where PYTHONDONTWRITEBYTECODE is set: compiling all test modules takes each process six seconds.
    """
    statuses = set()
    for shard in shards:
        if shard.tensorflow and sys.version_info >= (3, 14):
            session.warn("Tests on TensorFlow are left out: there is no build for this Python")
            continue
        # What cannot depend on the torch interceptor runs under the native one.
        only = "not one_interceptor" if "AMANDA_TORCH_INTERCEPTOR" in shard.env else ""
        command = [
            str(programs_of(shard.apart) / "pytest"),
            "-rs",  # a test that is left out is listed with its reason
            *("--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile"),
            "--no-loadscope-reorder",  # conftest.py orders
            f"--tensorflow={'only' if shard.tensorflow else 'without'}",
            "-m",
            " and ".join(filter(None, [marks, shard.marks, only])),
            *(str(path) for name in shard.paths for path in sorted(ROOT.glob(name))),
            *arguments,
        ]
        session.log(" ".join(command))
        settings = {
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONSAFEPATH": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **shard.env,
            **env,
        }
        statuses.add(subprocess.call(command, cwd=ROOT, env={**os.environ, **settings}))
    if statuses - {0, NO_TESTS}:
        session.error("Tests failed")
    if statuses <= {NO_TESTS}:
        session.error("No test was found for these arguments")


def test_apart(session: nox.Session, shards: Sequence[Shard], marks: str, *arguments: str) -> None:
    """Run the tests of drivers that have environments of their own."""
    for shard in shards:
        alone = APART[shard.apart]
        if not alone.fits:
            session.warn(f"{shard.apart} is left out: there is no {alone.group} for this Python")
            continue
        environment(session, "apart", apart=shard.apart)
        test(session, [shard], marks, *arguments)


def measure_coverage(
    session: nox.Session, tier: str, shards: Sequence[Shard], marks: str, *arguments: str
) -> None:
    """Run tests under coverage.py, and add what they ran to .coverage.TIER."""
    test(
        session,
        shards,
        marks,
        *("--cov", "--cov-config=maintenance/tiers/coverage.toml", "--cov-append", "--cov-report="),
        *arguments,
        COVERAGE_FILE=str(ROOT / f".coverage.{tier}"),
    )
