"""The pages of `docs/reference` that are made of the sources: public names, and the command line.

`python -m maintenance.site.reference` writes them; a test compares. mkdocstrings fills in
signatures and docstrings when the site is built.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from amanda_core.cli import app
from amanda_core.errors import AmandaError
from maintenance.site import agents

__all__ = ["PAGES", "pages"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/reference"


@dataclass(frozen=True)
class Page:
    """A page of public names.

    A page of hundreds of names would take a browser a minute to check, so that a module that has
    many is several pages, by where the names are defined.

    Attributes:
        module: The module whose public names it has.
        title: Its title.
        introduction: Its first paragraph.
        rooms: Packages and modules that define the names; all names if there are none.
    """

    module: str
    title: str
    introduction: str
    rooms: tuple[str, ...] = ()


_KIT = "`from amanda_tools.kit import ...`; [the first page](kit.md) has bases of tools."
_DRIVER_KIT = (
    "`from amanda_core.driver_kit import ...`; [the first page](driver-kit.md) says what other "
    "pages there are."
)
PAGES = {
    "kit": Page(
        "amanda_tools.kit",
        "For authors of tools",
        "What tools inherit and use: `from amanda_tools.kit import OperatorTool`. "
        "[Writing a tool](../guides/writing-a-tool.md) shows how. This page has the bases of tools "
        "and the accounts of operators; there are others for [tensors and weights](kit-tensors.md) "
        "and for [results and pages](kit-results.md).",
        ("mapping", "operators", "sequences"),
    ),
    "kit-tensors": Page(
        "amanda_tools.kit",
        "For authors of tools: tensors and weights",
        f"Values, types and statistics of tensors, and parameters. {_KIT}",
        ("tensors", "weights"),
    ),
    "kit-results": Page(
        "amanda_tools.kit",
        "For authors of tools: results and pages",
        f"Texts, charts, files and HTML pages of results. {_KIT}",
        ("output", "page"),
    ),
    "interface": Page(
        "amanda_core.interface",
        "The interface of drivers",
        "What a driver is. [What a driver may call](../guides/driver-reference.md) has the same "
        "names in short, [the hooks](../guides/hooks.md) and [the errors](../errors.md) have "
        "pages of their own.",
    ),
    "driver-kit": Page(
        "amanda_core.driver_kit",
        "For authors of drivers",
        "What a driver may inherit and call: `from amanda_core.driver_kit import Session`. "
        "[Writing a driver](../guides/writing-a-driver.md) shows how. This page has what executes, "
        "patches and declares; there are others for [the engine and threads]"
        "(driver-kit-engine.md), for [names, modules and imports](driver-kit-names.md), and for "
        "[parameters](driver-kit-weights.md).",
        ("driver_kit",),
    ),
    "driver-kit-engine": Page(
        "amanda_core.driver_kit",
        "For authors of drivers: engine and threads",
        f"Sessions, contexts, plans, actions and calls; the state of a thread. {_DRIVER_KIT}",
        ("engine", "runtime"),
    ),
    "driver-kit-names": Page(
        "amanda_core.driver_kit",
        "For authors of drivers: names, modules and imports",
        f"Ids of operators, call sites, scopes of modules, and when drivers load. {_DRIVER_KIT}",
        ("identity", "modules", "plugins"),
    ),
    "driver-kit-weights": Page(
        "amanda_core.driver_kit",
        "For authors of drivers: parameters",
        f"Which parameter an operator reads, and which part of it. {_DRIVER_KIT}",
        ("weights",),
    ),
}


def entry(module: str, name: str) -> str:
    """Return the entry of a public name: a directive for mkdocstrings, or what it cannot find."""
    found = getattr(importlib.import_module(module), name)
    place = getattr(found, "__module__", "")
    qualified = getattr(found, "__qualname__", "")
    if isinstance(found, type) or callable(found):
        place = place if isinstance(place, str) and place.startswith("amanda") else ""
        name = qualified if place and qualified and "." not in str(qualified) else name
    else:
        place = ""
    place = place or _imports(module).get(name, module)
    while name not in _defined(place) and name in _imports(place):
        place = _imports(place)[name]
    if name in _defined(place):
        directive = f"::: {place}.{name}"
        if directive in (FOLDER / "amanda.md").read_text("utf-8").splitlines():
            return f"## `{name}`\n\nThe same as [`amanda.{name}`](amanda.md#{place}.{name})."
        return directive
    # Such as `A, B = range(2)`, which nothing that reads sources documents.
    return f"## `{name}`\n\nA constant of `{place}`: `{found!r}`."


def _defined(module: str) -> set[str]:
    """Return the names that a module's source defines one by one, and its modules."""
    file = importlib.import_module(module).__file__
    assert file is not None
    tree = ast.parse(Path(file).read_text("utf-8"))
    names = {path.stem for path in Path(file).parent.glob("*") if Path(file).stem == "__init__"}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _imports(module: str) -> dict[str, str]:
    """Return the names that a module imports from others, directly or all names of them."""
    file = importlib.import_module(module).__file__
    assert file is not None
    found = {}
    for node in ast.walk(ast.parse(Path(file).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amanda"):
            assert node.module is not None
            for alias in node.names:
                names = [alias.name]
                if alias.name == "*":
                    names = list(importlib.import_module(node.module).__all__)
                found.update(dict.fromkeys(names, node.module))
    return found


def public(module: str) -> list[str]:
    """Return the public names of a module that are not errors, which have a page of their own."""
    loaded = importlib.import_module(module)
    names = [name for name in loaded.__all__ if not name.startswith("__")]
    return [name for name in sorted(names, key=str.lower) if not _is_error(getattr(loaded, name))]


def on_page(page: Page) -> list[str]:
    """Return the names that a page has."""
    loaded = importlib.import_module(page.module)

    def room(name: str) -> str:
        # A public name may be a module, such as `charts`.
        place = loaded._MODULES.get(name) or getattr(loaded, name).__name__
        return str(place).removeprefix(f"{page.module}.").partition(".")[0]

    return [name for name in public(page.module) if not page.rooms or room(name) in page.rooms]


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, (AmandaError, Warning))


def names_page(page: Page) -> str:
    """Return a page with public names of a module."""
    made = "This page is made by `nox -s docs`; do not edit it."
    parts = [f"# {page.title}\n\n{page.introduction}\n\n{made}"]
    parts += [entry(page.module, name) for name in on_page(page)]
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Return the page of the commands, with their help as a terminal of 96 columns shows it."""
    lines = [
        "# The command line",
        "",
        "The program `amanda` comes with the extra `cli` of `amanda-core`; `python -m amanda` is",
        "the same. [Running programs under tools](../guides/running.md) explains what is listed "
        "here.",
        "",
        "| exit status | meaning |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | `run`: the program ended well, and a result could not be written; `diff`, "
        "`replay`: a value differs; `doctor`: an error was found |",
        "| 2 | wrong use, a wrong option or configuration, or a program that could not be "
        "started; `diff`: one run has more than the other; `replay`: the operator "
        "cannot be executed again |",
        "| 3 | `diff`, `replay`: wrong use |",
        "| 4 | `run`: a condition of `--fail-if` holds |",
        "| any other | `run`: that of the program |",
        "",
        "This page is made by `nox -s docs`; do not edit it.",
        "",
    ]
    for path, command in sorted(commands(app.amanda, "amanda")):
        # As the group hands them on to its commands.
        names = app.amanda.context_settings["help_option_names"]
        context = click.Context(
            command,
            info_name=path,
            max_content_width=96,
            terminal_width=96,
            help_option_names=names,
        )
        lines += [f"## `{path}`", "", "```text", command.get_help(context).rstrip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and those below it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None:
                yield from commands(found, f"{path} {name}")


def pages() -> dict[Path, str]:
    """Return all pages that are made of the sources."""
    made = {FOLDER / f"{name}.md": names_page(page) for name, page in PAGES.items()}
    # What `amanda explain` reads.
    explained = ROOT / "amanda_core/src/amanda_core/cli/errors.md"
    errors = (ROOT / "docs/errors.md").read_text("utf-8")
    made |= {FOLDER / "command-line.md": command_line(), explained: errors}
    return made | agents.files(made)


if __name__ == "__main__":
    for place, text in pages().items():
        place.write_text(text, "utf-8")
