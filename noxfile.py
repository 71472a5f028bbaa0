"""Commands of the repository: `nox --list` names them, CONTRIBUTING.md says when to run which.

Each needs only Python 3.11 or later and pip, and sets up everything itself. The sessions share one
environment, .nox/python3.X. `tests` has its own: a fast test that needs what only another session
installs must fail, whatever ran before. They use the Python that runs nox:
`python3.12 -m nox -s tests` tests on 3.12. What each installs is a group in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

import nox

# The nox program does not put the root there, unlike `python -m nox`.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))

from maintenance.sessions.environments import APART, FEW, ROOT, copy_of, environment, group, run
from maintenance.sessions.shards import (
    ALL,
    EVERY,
    EXHAUSTIVE,
    FAST,
    NATIVE,
    NIGHTLY,
    PURE,
    PURE_DRIVER,
    REST,
    SHARDS,
    SLOW,
    USUAL,
    Shard,
    measure_coverage,
    test,
    test_apart,
)

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
# nox itself would make one environment for each session; see `environment`.
nox.options.default_venv_backend = "none"


@nox.session
def demo(session: nox.Session) -> None:
    """Instrument a pretrained model on real photographs; writes demo_output/."""
    environment(session, "models")
    run(session, "python", "examples/demo/demo.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the fast tests; select with `-- amanda_core` or `-- -k name`."""
    environment(session, "tests", apart=FEW)
    shards = NATIVE if session.posargs else [*NATIVE, PURE_DRIVER]
    few = [shard._replace(apart=FEW) for shard in shards]
    test(session, few, FAST, *session.posargs)


@nox.session
def tests_all(session: nox.Session) -> None:
    """Run all but the exhaustive tests; `-- torch tf-graphs` selects shards."""
    unknown = [name for name in session.posargs if name not in SHARDS]
    if unknown:
        session.error(f"There is no shard {', '.join(unknown)}; there are {', '.join(SHARDS)}")
    shards = [SHARDS[name] for name in session.posargs or USUAL]
    shared = [shard for shard in shards if not shard.apart]
    if shared:
        environment(session, "all-tests")
        test(session, shared, ALL)
    # A sample: all of their tests run in sessions of their own, and in `nightly`.
    test_apart(session, [shard for shard in shards if shard.apart], FAST)


@nox.session
def tests_rest(session: nox.Session) -> None:
    """Run the slow tests without TensorFlow, and the fast ones of drivers whose environments are
    small; CI runs it after `tests`.
    """
    environment(session, "all-tests")
    test(session, REST, ALL)
    test_apart(session, [SHARDS[name] for name in USUAL if SHARDS[name].apart], FAST)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the exhaustive tests, which may take hours, and the slow ones that CI leaves out;
    pytest's arguments go after --, and select among the exhaustive ones.
    """
    environment(session, "all-tests")
    test(session, [*NATIVE, PURE], EXHAUSTIVE, *session.posargs)
    if not session.posargs:
        test(session, NIGHTLY, ALL)
        test_apart(session, [shard for shard in SHARDS.values() if shard.apart], EVERY)


@nox.session
def jax(session: nox.Session) -> None:
    """Test the JAX driver in an environment of its own; select with `-- -k name`."""
    test_apart(session, [SHARDS["jax"]], EVERY, *session.posargs)


@nox.session
def jax_programs(session: nox.Session) -> None:
    """Run programs of JAX's libraries plain and under tools; `-- --record` keeps the results."""
    environment(session, "jax-programs", apart="amanda_driver_jax")
    program = ("python", "-m", "maintenance.sweeps.jax_programs", *session.posargs)
    run(session, *program, apart="amanda_driver_jax")


@nox.session
def mindspore(session: nox.Session) -> None:
    """Test the MindSpore driver in an environment of its own; select with `-- -k name`."""
    test_apart(session, [SHARDS["mindspore"]], EVERY, *session.posargs)


@nox.session
def mxnet(session: nox.Session) -> None:
    """Test the MXNet driver in an environment of its own; select with `-- -k name`."""
    test_apart(session, [SHARDS["mxnet"]], EVERY, *session.posargs)


@nox.session
def durations(session: nox.Session) -> None:
    """Measure the duration of each test and write maintenance/tiers/durations.json; takes hours.

    Select files with `-- tests/tools/dump/test_dump.py`; the figures of the others are kept.
    """
    environment(session, "all-tests")
    with tempfile.TemporaryDirectory() as folder:
        shards = [*NATIVE, Shard([], env=PURE.env) if session.posargs else PURE]
        test(session, shards, EVERY, f"--record-durations={folder}", *session.posargs)
        run(session, "python", "-m", "maintenance.tiers.durations", folder)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which lines the fast tests run, or with `-- all` also the slow ones, by package."""
    environment(session, "all-tests", "coverage")
    measure_fast(session)
    report_coverage(session, "fast")
    if "all" in session.posargs:
        shutil.copy(ROOT / ".coverage.fast", ROOT / ".coverage.all")
        measure_coverage(session, "all", [*NATIVE, PURE], SLOW)
        report_coverage(session, "all")


@nox.session
def mutation(session: nox.Session) -> None:
    """Insert 100 defects into the sources, one at a time, and report which the fast tests find."""
    environment(session, "all-tests", "coverage")
    if not (ROOT / ".coverage.fast").exists():
        measure_fast(session)
    run(session, "python", "-m", "maintenance.tiers.mutation", ".coverage.fast", *session.posargs)


def measure_fast(session: nox.Session) -> None:
    """Measure the fast tests and note the test functions that ran each line, for `mutation`."""
    (ROOT / ".coverage.fast").unlink(missing_ok=True)
    measure_coverage(session, "fast", [*NATIVE, PURE_DRIVER], FAST, "--record-contexts")


def report_coverage(session: nox.Session, tier: str) -> None:
    """Print what a tier ran by package; fail below its bounds."""
    run(session, "python", "-m", "maintenance.tiers.covered", f".coverage.{tier}", "--tier", tier)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the cost of instrumentation and write docs/benchmarks; `-- --quick` is shorter."""
    environment(session, "bench")
    run(session, "python", "-m", "maintenance.benchmarks", *session.posargs)
    benchmarks(session)


@nox.session(venv_backend="venv")
def docs(session: nox.Session) -> None:
    """Build the documentation's site into build/site; `-- --serve` shows it while you write.

    It needs no network once it is built, and any host of static files serves it.
    """
    session.install("-c", "constraints.txt", *group("docs"))
    with tempfile.TemporaryDirectory() as temporary:
        members = (copy_of(member, temporary) for member in ("amanda_core", "amanda_tools"))
        session.install("--no-deps", *map(str, members))
    session.run("python", "-m", "maintenance.site", *session.posargs)


@nox.session(venv_backend="none")
def benchmarks(session: nox.Session) -> None:
    """Record what benchmarks wrote and renew the figures on pages; `-- --stale` lists old ones."""
    session.run(sys.executable, "-m", "maintenance.figures", *session.posargs, external=True)


@nox.session
def packages(session: nox.Session) -> None:
    """Build the distributions and check each in a fresh environment; takes minutes."""
    environment(session, "build")
    run(session, "python", "-m", "maintenance.packages")


@nox.session(venv_backend="venv")
def release(session: nox.Session) -> None:
    """Build the files of a release into dist/, and install and run them as strangers do.

    `-- --python python3.13` adds an interpreter; `-- --tag v0.1.0` checks a tag. Uploads nothing.
    """
    session.install("-c", "constraints.txt", *group("release"))
    session.run("python", "-m", "maintenance.packages.release", *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Build the examples, install them as users would, run their tests, and uninstall them
    again.
    """
    environment(session, "build")
    run(session, "python", "-m", "maintenance.packages.examples")


@nox.session
def sweep(session: nox.Session) -> None:
    """Run operators, models, programs, long runs and faults, and write docs/trust.md.

    Everything takes hours. Run parts or samples with `-- operators --sample 40`; the page is made
    from all results in sweep_results/.
    """
    environment(session, "sweep", apart="sweep", loose="sweep-loose")
    program = ("python", "-m", "maintenance.sweeps.everything")
    run(session, *program, *session.posargs, apart="sweep")


@nox.session
def others(session: nox.Session) -> None:
    """Run the tests of a framework or library under tools; `-- report` writes docs/others.md.

    `-- torch --from FOLDER`, tensorflow, transformers, accelerate and peft need the folder of the
    sources; `-- keras` and `-- keras-on-torch` use the tests in the installed package. Run parts
    with `--only test_nn --every 20`.
    """
    environment(session, "others")
    run(session, "python", "-m", "maintenance.sweeps.others", *session.posargs)


@nox.session
def reports(session: nox.Session) -> None:
    """Try what users of other tools report, and write docs/reports.md."""
    environment(session, "all-tests")
    run(session, "python", "-m", "maintenance.reports", *session.posargs)


@nox.session(venv_backend="venv")
def references(session: nox.Session) -> None:
    """Compare tools with torchao, Brevitas, ModelOpt and PyTorchFI, in an environment of its own.

    Prints the table of docs/references.md.
    """
    session.install(*group("references"))
    session.install("--no-deps", *group("references-loose"))
    with tempfile.TemporaryDirectory() as temporary:
        members = ("amanda_core", "amanda_tools", "amanda_driver_torch")
        session.install(*(str(copy_of(member, temporary)) for member in members))
    session.run("python", "-m", "maintenance.benchmarks.references", *session.posargs)


@nox.session
def screenshots(session: nox.Session) -> None:
    """Make the pictures of reports in docs/screenshots; needs Chromium and chromedriver."""
    environment(session, "all-tests")
    run(session, "python", "-m", "maintenance.browser.screenshots", *session.posargs)


@nox.session
def accessibility(session: nox.Session) -> None:
    """Check reports of all tools, and pages such as `-- axe.min.js build/site`, with axe.

    `npm pack axe-core` fetches axe.min.js. It needs Chromium and chromedriver, and no network.
    """
    environment(session, "all-tests")
    with tempfile.TemporaryDirectory() as folder:
        program = ("python", "-m", "maintenance.browser", "--reports", folder)
        run(session, *program, *session.posargs)


@nox.session(venv_backend="venv")
def walk(session: nox.Session) -> None:
    """Do what README and the guides print, in order, on a terminal, as a new user does; 30 minutes.

    `-- docs/tutorial.md` walks over one page; `-- --folder walk` keeps the clone, the environment
    and the screens, which are to be looked at.
    """
    session.install("-c", "constraints.txt", *group("walk"))
    with tempfile.TemporaryDirectory() as temporary:
        session.install(f"{copy_of('amanda_core', temporary)}[cli]")
    session.run("python", "-m", "maintenance.walk", *session.posargs)


@nox.session
def vendor(session: nox.Session) -> None:
    """Renew the JavaScript libraries that pages contain; `-- echarts=6.2.0` takes another version.

    They come from the npm registry. What uses them needs neither node nor a network.
    """
    program = (sys.executable, "-m", "maintenance.packages.vendor")
    session.run(*program, *session.posargs, external=True)


@nox.session
def backends(session: nox.Session) -> None:
    """Run one source of tools and the conformance kit on every backend; writes docs/backends.md.

    `-- amanda_driver_jax` renews the rows of one environment, `-- shared` those of the shared one.
    """
    for name in session.posargs or ["shared", *APART]:
        apart = name if name in APART else ""
        environment(session, *([] if apart else ["frameworks"]), "pytest", apart=apart)
        run(session, "python", "-m", "maintenance.backends", name, apart=apart)


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules, formatting and types; `nox -s lint -- --fix` fixes what ruff can."""
    environment(session, "all-tests", "coverage")
    run(session, "python", "-m", "maintenance.lint", *session.posargs)


@nox.session
def matrix(session: nox.Session) -> None:
    """Test the drivers over the versions of their frameworks; writes docs/support.md; hours.

    One release: `-- torch 2.15.0`; a part: `--interceptor native --group driver`. It uses the
    Python that runs nox. The page is made of all results in maintenance/matrix/results.json.
    """
    environment(session)
    run(session, "python", "-m", "maintenance.matrix", *session.posargs)


@nox.session(venv_backend="venv")
def layers(session: nox.Session) -> None:
    """Print the rooms of the core, each with the rooms that it imports."""
    core = nox.project.load_toml(ROOT / "amanda_core/pyproject.toml")["project"]
    # The checks are in a package of pytest plugins.
    session.install(*core["dependencies"], *group("pytest"))
    program = ("python", "-m", "amanda_core.testing.checks.layers")
    session.run(*program, *session.posargs, env={"PYTHONPATH": "amanda_core/src"})
