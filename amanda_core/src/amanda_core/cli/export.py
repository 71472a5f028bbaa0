"""`amanda export`: a model from a file with the edits of tools, as a new file.

Owns which tools and files are accepted, and the order of the steps. What a model in a file is, the
driver of its framework decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amanda_core.cli.blocking import with_blocking
from amanda_core.config import Selecting, factories, from_flags
from amanda_core.config.settings import merge
from amanda_core.driver_kit.model_files import ModelFile
from amanda_core.engine.activation import apply
from amanda_core.engine.tool import Tool, in_dependency_order
from amanda_core.errors import ConfigError, OutputError
from amanda_core.plugins.discovery import drivers, plugin_manager
from amanda_core.results import printable
from amanda_core.shorthands.exporting import exported

__all__ = ["export"]


@click.command()
@click.argument("model")
@click.option(
    "-t",
    "--tool",
    "tools",
    multiple=True,
    required=True,
    metavar="TOOL[:K=V,...]",
    help="A tool and its options, as in `amanda run`; may be repeated.",
)
@click.option("-o", "--output", required=True, metavar="FILE", help="The new file.")
@click.option(
    "--inputs",
    multiple=True,
    metavar="FILE",
    help="Inputs of one run, as a file of the model's framework; may be repeated. The model runs "
    "on each under the tools before, as to calibrate. By default the model runs once, on random "
    "numbers.",
)
@click.option("--ops", multiple=True, metavar="GLOB", help="Only these ops; may be repeated.")
@click.option(
    "--modules", multiple=True, metavar="GLOB", help="Only ops in these modules; may be repeated."
)
@click.option("--force", is_flag=True, help="Replace the new file if it is there.")
@with_blocking
def export(
    model: str,
    tools: tuple[str, ...],
    output: str,
    inputs: tuple[str, ...],
    ops: tuple[str, ...],
    modules: tuple[str, ...],
    force: bool,
) -> None:
    r"""Write MODEL, a file, with the edits of tools as a new file that needs no Amanda.

    \b
        amanda export model.onnx -t prune:sparsity=0.5 -o pruned.onnx
        amanda export model.onnx -t quantize --inputs batch.npz -o quantized.onnx

    What tools make of weights is written as weights, and routines that are marked with
    amanda.staged as operators. The new file is checked, run, and compared with the model under the
    tools. Any other routine that changes values is refused, and nothing is written.
    """
    source, target = Path(model), Path(output)
    _check_paths(source, target, force)
    found = _model_file(source)
    made = _tools(tools, ops, modules)
    runs = [found.read_inputs(path) for path in inputs] or [found.example_inputs()]
    for one in runs:
        found.run(one)  # What is wrong with inputs is said best without tools.
    if inputs:
        with apply(*made.values()):
            for one in runs:
                found.run(one)
    program = exported(found.model, list(made.values()), *runs)
    _check_edits(made, source)
    with apply(*made.values()):
        outputs = [found.run(one) for one in runs]
    try:
        checked = found.write(program, str(target), runs, outputs)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{str(target)!r} cannot be written: {error}", fix="Name another file with -o"
        ) from error
    click.echo(f"{printable(target)}: {printable(source)} with {', '.join(made)}; {checked}")


def _check_paths(source: Path, target: Path, force: bool) -> None:
    if not source.is_file():
        raise ConfigError(
            f"The file {str(source)!r} does not exist", fix="Name the file of a model"
        )
    if not target.parent.is_dir():
        raise OutputError(f"The folder {str(target.parent)!r} does not exist", fix="Make it before")
    if target.exists() and (target.is_dir() or target.samefile(source)):
        what = "a folder" if target.is_dir() else "the model itself"
        raise OutputError(f"{str(target)!r} is {what}", fix="Name another file with -o")
    if target.exists() and not force:
        raise OutputError(
            f"{str(target)!r} is there already", fix="Name another with -o, or replace it: --force"
        )


def _model_file(source: Path) -> ModelFile:
    found: ModelFile | None = plugin_manager().hook.amanda_model_file(path=str(source))
    if found is None:
        names = [one.info.name for one in drivers() if one.has("amanda_model_file")]
        readers = ", ".join(names) or "none is installed, so install one"
        raise ConfigError(
            f"No installed driver reads {str(source)!r} as a model",
            where="amanda export",
            fix=f"Drivers that read files: {readers}. Models in programs are exported with "
            "amanda.exported",
        )
    return found


def _tools(
    texts: tuple[str, ...], ops: tuple[str, ...], modules: tuple[str, ...]
) -> dict[str, Tool]:
    select = Selecting(ops or None, modules or None, None, None, None, "--ops, --modules")
    none = from_flags()
    config = merge(none, none, from_flags(texts, select=select, names=("-t", "", "", "")))
    return {settings.name: factories.make(settings) for settings in config.tools}


def _check_edits(tools: dict[str, Tool], source: Path) -> None:
    """Refuse tools that have changed nothing."""
    for name, tool in tools.items():
        parts: tuple[Any, ...] = in_dependency_order([tool])
        if not any(one._amanda.returned for one in parts):
            raise ConfigError(
                f"{name} changes nothing in {str(source)!r}",
                where="amanda export",
                fix="Leave it out if it only looks; `amanda run` runs such tools. Otherwise give "
                "it operators of this model",
            )
