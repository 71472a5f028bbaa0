"""Command line: `python -m maintenance.sweeps.others torch --from FOLDER --only test_nn`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from . import comparing, report
from .running import Limits
from .suites import SUITES, commit

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "sweep_results" / "others"


def main() -> int:
    """Run files of a suite and write their results; return 1 if a failure is unexplained."""
    parser = argparse.ArgumentParser(
        prog="python -m maintenance.sweeps.others", description=__doc__
    )
    parser.add_argument("suite", choices=[*SUITES, "report", "failures"])
    parser.add_argument("--from", dest="source", type=Path, help="folder of the sources")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--every", type=int, default=0, help="only each n-th test of a file")
    parser.add_argument("--tools", default=",".join(comparing.TOOLS), help="or their -forward")
    parser.add_argument("--interceptor", default="", help="PyTorch's: native or function_mode")
    parser.add_argument("--seconds", type=float, default=3600, help="for all tests of a file")
    parser.add_argument("--new", action="store_true", help="only files that have no result yet")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.suite == "report":
        return report.write(options.output)
    if options.suite == "failures":
        print(report.failures(options.output))
        return 0
    suite = SUITES[options.suite]
    if options.interceptor:
        variables = {**suite.variables, "AMANDA_TORCH_INTERCEPTOR": options.interceptor}
        suite = dataclasses.replace(suite, variables=variables)
    report.note_source(options.output, options.suite, commit(options.source))
    failed = 0
    for file in suite.test_files(options.source, options.only, options.every):
        path = comparing.path_of(
            options.output, options.suite, file.path, file.every, options.interceptor
        )
        if options.new and path.exists():
            continue
        result = comparing.compare(
            options.suite,
            file,
            tuple(options.tools.split(",")),
            Limits(file=options.seconds),
            options.interceptor,
        )
        comparing.write(result, options.output)
        print(report.line(result), flush=True)
        failed += sum(len(report.unexplained(result, tool)) for tool in result.tools)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
