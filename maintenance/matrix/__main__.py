"""Test the drivers with several versions of their frameworks, and write docs/support.md.

Builds one environment at a time, as a user would, runs a selection of the tests in it, and removes
it again, because a build of PyTorch takes about 5 GB. Results are kept in results.json beside this
file, and the page is made from all of them, so that versions can be run one by one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "support.md"

#: Framework -> its releases, oldest first.
RELEASES = {
    "torch": ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "tensorflow-cpu": (
        *("2.16.2", "2.17.1", "2.18.1", "2.19.1", "2.20.0", "2.21.0"),
        # A candidate, with which Python 3.14 is tried.
        "2.22.0rc0",
    ),
    "jax": ("0.10.2", "0.11.2", "0.12.0.1"),
    "onnxruntime": ("1.28.0", "1.29.0", "1.30.0", "1.31.1", "1.32.0"),
}
#: Framework -> its name on the page.
TITLES = {
    "torch": "PyTorch",
    "tensorflow-cpu": "TensorFlow",
    "jax": "JAX",
    "onnxruntime": "ONNX Runtime",
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Framework -> the environment variable that names an interceptor, if there is one, and these.
INTERCEPTORS = {
    "torch": ("AMANDA_TORCH_INTERCEPTOR", ("native", "function_mode")),
    "tensorflow-cpu": ("AMANDA_TF_INTERCEPTOR", ("native", "python")),
    "jax": ("AMANDA_JAX_INTERCEPTOR", ("python",)),
    "onnxruntime": ("", ("python",)),
}
MEMBERS = {
    "torch": ("amanda_core[cli]", "amanda_tools", "amanda_driver_torch"),
    "tensorflow-cpu": ("amanda_core[cli]", "amanda_tools", "amanda_driver_tf"),
    "jax": ("amanda_core[cli]", "amanda_tools", "amanda_driver_jax"),
    "onnxruntime": ("amanda_core[cli]", "amanda_tools", "amanda_driver_onnxruntime"),
}
LEFT_BY_BUILDS = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so")
#: Framework -> what its tests need beside it.
NEEDED = {
    "torch": (
        *("pytest-xdist", "hypothesis", "expecttest", "numpy", "networkx", "scipy"),
        *("transformers", "efficientnet-lite-pytorch", "safetensors", "jsonschema"),
    ),
    "tensorflow-cpu": ("pytest-xdist", "hypothesis", "numpy", "networkx"),
    "jax": ("pytest-xdist", "flax", "optax", "equinox", "keras", "safetensors", "flatbuffers"),
    "onnxruntime": ("pytest-xdist", "hypothesis", "safetensors"),
}
#: Release -> what it does not work without, although its metadata do not say so.
PINS = {
    # Its `tf.io.write_graph` passes an argument that later ones do not know.
    "2.20.0": ("protobuf<6",),
}
#: Framework -> group of tests -> its files.
GROUPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "torch": {
        "conformance": ("tests/seam/conformance",),
        "identity": ("tests/programs/test_identity_instrumentation.py",),
        "paper": ("tests/paper/test_paper_listings.py", "tests/paper/test_tutorial.py"),
        "driver": ("amanda_driver_torch/tests",),
    },
    "tensorflow-cpu": {
        "conformance": ("tests/portable/test_conformance.py",),
        "paper": ("tests/portable/test_tensorflow_tutorial.py",),
        "driver": ("amanda_driver_tf/tests",),
    },
    "jax": {
        "conformance": ("amanda_driver_jax/tests/test_conformance.py",),
        "driver": ("amanda_driver_jax/tests",),
    },
    "onnxruntime": {
        "conformance": ("amanda_driver_onnxruntime/tests/test_conformance.py",),
        "driver": ("amanda_driver_onnxruntime/tests",),
    },
}
FAST = "not slow and not exhaustive"
#: A deprecation in a new release is not a failure.
ARGUMENTS = (
    "-q",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    *("--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile"),
    *("-W", "ignore::FutureWarning"),
    *("-W", "ignore::DeprecationWarning"),
    *("-W", "ignore::UserWarning:torch"),
    # What torch says of Python 3.13.0 wherever Dynamo makes a guard.
    *("-W", "ignore:Guards may run slower:RuntimeWarning"),
)


class Count(NamedTuple):
    """Outcomes of the tests of one group."""

    passed: int
    failed: int
    skipped: int


def main() -> None:
    """Run the requested versions and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", nargs="?", choices=RELEASES, help="only this one")
    parser.add_argument("versions", nargs="*", help="only these releases")
    parser.add_argument("--python", help="use this environment's interpreter, and leave it there")
    parser.add_argument("--interceptor", help="only this one")
    parser.add_argument("--group", help="only this group of tests")
    parser.add_argument("--page", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    frameworks = [arguments.framework] if arguments.framework else list(RELEASES)
    for framework in () if arguments.page else frameworks:
        for version in arguments.versions or RELEASES[framework]:
            run_version(
                framework, version, arguments.python, arguments.interceptor, arguments.group
            )
            PAGE.write_text(page(), "utf-8")
    PAGE.write_text(page(), "utf-8")


def run_version(
    framework: str,
    version: str,
    python: str | None,
    only_interceptor: str | None = None,
    only_group: str | None = None,
) -> None:
    """Run the tests with one release and record the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        if python is None:
            try:
                python = str(build(Path(folder), framework, version))
            except subprocess.CalledProcessError as error:
                print(f"{framework} {version}: {error}", file=sys.stderr)
                return
        asked = "import platform; print(platform.python_version())"
        found = subprocess.run(
            [python, "-c", asked], check=True, capture_output=True, text=True
        ).stdout.strip()
        variable, interceptors = INTERCEPTORS[framework]
        for interceptor in interceptors:
            if only_interceptor not in (None, interceptor):
                continue
            marks = FAST if interceptor == "native" else f"{FAST} and not one_interceptor"
            for group, files in GROUPS[framework].items():
                if only_group not in (None, group):
                    continue
                print(f"{framework} {version}, Python {found}: {group}, {interceptor}", flush=True)
                chosen = {variable: interceptor} if variable else {}
                count, failures = run_tests(
                    python, files, chosen, marks, Path(folder, "results.xml")
                )
                keep(framework, version, found, interceptor, group, count, failures)


def build(folder: Path, framework: str, version: str) -> Path:
    """Create an environment with a release of a framework; return its interpreter."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    members = []
    for member in MEMBERS[framework]:
        name, bracket, extra = member.partition("[")
        copy = shutil.copytree(ROOT / name, folder / name, ignore=LEFT_BY_BUILDS)
        members.append(f"{copy}{bracket}{extra}")
    install = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir"]
    needed = [f"{framework}=={version}", *members, *NEEDED[framework], *PINS.get(version, ())]
    subprocess.run([*install, *needed], check=True)
    return python


def run_tests(
    python: str, files: Iterable[str], environment: Mapping[str, str], marks: str, results: Path
) -> tuple[Count, list[str]]:
    """Run tests; return their outcomes and the ids of those that failed."""
    results.unlink(missing_ok=True)
    variables = {**os.environ, **environment, "PYTHONSAFEPATH": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run(
        [python, "-m", "pytest", *ARGUMENTS, "-m", marks, f"--junitxml={results}", *files],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if not results.exists():
        return Count(0, 1, 0), ["the run itself: it ended without results"]
    passed, skipped, failures = 0, 0, []
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return Count(passed, len(failures), skipped), failures


def keep(
    framework: str,
    version: str,
    python: str,
    interceptor: str,
    group: str,
    count: Count,
    failures: list[str],
) -> None:
    """Record the outcome of one group in place of an earlier one."""
    result = {
        "framework": framework,
        "version": version,
        "python": python,
        "system": f"{platform.system()} {platform.machine()}",
        "interceptor": interceptor,
        "group": group,
        "date": datetime.date.today().isoformat(),
        "count": count,
        "failures": failures,
    }
    kept = {_key(r): r for r in results()} | {_key(result): result}
    lines = ",\n".join(json.dumps(kept[key]) for key in sorted(kept))
    RESULTS.write_text(f"[\n{lines}\n]\n", "utf-8")


def results() -> list[dict[str, Any]]:
    """Return all results that were recorded."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))
    return found


def _key(result: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("framework", "version", "python", "interceptor", "group")
    return tuple(result[name] for name in names)


def page() -> str:
    """Return the page with all available results."""
    found = results()
    lines = [
        "# Supported versions",
        "",
        "The releases of each framework that were tested. `nox -s matrix` builds an environment",
        "for each release, runs its fast tests and writes this page. The tests are the",
        "conformance kit, identity, the paper's programs and all of the driver's own. A cell is",
        "*passed/run*; *in the other*: the tests of the next row run under both interceptors. CI",
        "runs the pinned pair of releases only.",
        "",
        "- A release older than those listed is refused by the metadata of the driver, and by",
        "  name at `amanda.apply`.",
        "- A newer release is *self-tested* at its first `apply`, in a process of its own. If the",
        "  native interceptor fails, the one in Python is used. If that fails, too, `apply`",
        "  refuses the release by name. `amanda doctor` and `amanda drivers` show which one is",
        "  used and why.",
        "- PyTorch 2.10 and 2.11 cannot make saved tensors from Python. There an edit adds a node",
        "  to the graph, and sums of gradients of gradients may differ in the last bit.",
        "- Callables of `torch.compile` stay compiled with the native interceptor. With the other,",
        "  and under a newer release, they run eagerly, with the reason. Before PyTorch 2.13 their",
        "  code for tools counts for the accumulated limit of recompilations (256 for a function).",
        "- On a GPU (NVIDIA H100, PyTorch 2.11.0 with CUDA 13.0, Python 3.12) all fast tests of",
        "  the driver passed; [trust.md](trust.md) shows what else ran there.",
        "",
    ]
    for framework, title in TITLES.items():
        lines += _table(framework, title, [r for r in found if r["framework"] == framework])
    lines += [
        "## Python",
        "",
        "The releases that were run with each Python. No other pair was tried. TensorFlow before",
        "2.22.0rc0 has no build for Python 3.14, and JAX 0.10 is the newest for Python 3.11. MXNet",
        "1.9 and MindSpore 2.10 have no rows: `nox -s mxnet mindspore` tests them with the Python",
        "that runs nox.",
        "",
        f"| Python | {' | '.join(TITLES.values())} |",
        "|---" * (len(TITLES) + 1) + "|",
    ]
    lines += [
        f"| {name} | {' | '.join(_run_with(name, framework, found) for framework in TITLES)} |"
        for name in PYTHONS
    ]
    failing = [r for r in found if r["failures"]]
    if failing:
        lines += ["", "## Failures", ""]
        for r in failing:
            where = f"{r['framework']} {r['version']}, Python {r['python']}, {r['interceptor']}"
            lines.append(f"- {where}, {r['group']}:")
            lines += [f"    - `{failure}`" for failure in r["failures"]]
    return "\n".join(lines) + "\n"


def _run_with(python: str, framework: str, results: list[dict[str, Any]]) -> str:
    tried = {
        r["version"]
        for r in results
        if r["framework"] == framework and str(r["python"]).startswith(f"{python}.")
    }
    return ", ".join(v for v in RELEASES[framework] if v in tried) or "not tried"


def _table(framework: str, title: str, results: list[dict[str, Any]]) -> list[str]:
    groups = list(GROUPS[framework])
    columns = [title, "Python", "interceptor", *groups, "run on"]
    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for version in RELEASES[framework]:
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for r in results:
            if r["version"] == version:
                passed, failed, _ = r["count"]
                row = cells.setdefault((r["python"], r["interceptor"]), {})
                # The oldest, as groups may be run apart.
                row["run on"] = min(r["date"], row.get("run on", r["date"]))
                # Such tests run under both interceptors themselves.
                row[r["group"]] = (
                    f"{passed}/{passed + failed}" if passed + failed else "in the other"
                )
        if not cells:
            lines.append(f"| {version} | | not tried |" + " |" * (len(groups) + 1))
        for (python, interceptor), row in cells.items():
            shown = " | ".join(row.get(name, "not run") for name in columns[3:])
            lines.append(f"| {version} | {python} | {interceptor} | {shown} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
