"""`amanda explain`: what an error means and what to do, by its slug.

The explanations are docs/errors.md of the repository, of which this package contains a copy.
"""

from __future__ import annotations

import difflib
import re
from importlib import resources

import click

from amanda_core.cli.drawing import show_json

__all__ = ["explain", "explanations"]

_FILE = "errors.md"


def explanations() -> dict[str, str]:
    """Return slug -> its section of the page about errors."""
    text = resources.files(__package__).joinpath(_FILE).read_text("utf-8")
    parts = re.split(r"^## `([a-z-]+)`.*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


@click.command()
@click.argument("slug", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def explain(slug: str | None, as_json: bool) -> None:
    """Explain an error, given the SLUG in brackets at its end; without one, list all slugs."""
    found = explanations()
    if slug is None:
        if as_json:
            show_json(list(found))
        else:
            click.echo("\n".join(found))
        return
    slug = slug.strip("[]")
    if slug not in found:
        close = difflib.get_close_matches(slug, found, 1, 0.5)
        meant = f". Did you mean {close[0]!r}?" if close else ""
        raise click.UsageError(f"No error has the slug {slug!r}{meant}")
    if as_json:
        show_json({"slug": slug, "explanation": found[slug]})
    else:
        click.echo(f"{slug}\n\n{found[slug]}")
