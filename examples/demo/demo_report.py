"""Output of the demo: tables on the terminal and one picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from demo_model import Photo, Prediction

#: Sizes in pixels on the contact sheet.
THUMBNAIL, CAPTION, MARGIN, HEADING = 132, 36, 10, 58

INK, PAPER, RIGHT, WRONG = "#222222", "#ffffff", "#1a7f37", "#c62828"


def progress(text: str) -> None:
    """Print progress to stderr, so that stdout contains only results."""
    print(text, file=sys.stderr, flush=True)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with rich on a terminal, as aligned plain text otherwise."""
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            # As Text, so that rich does not interpret markup in a cell.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
    else:
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        print(title)
        for row in [columns, ["-" * width for width in widths], *rows]:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
    print()


@dataclass(frozen=True)
class PrunedRun:
    """Predictions for all photographs with pruned convolutions."""

    sparsity: float
    achieved: float
    predictions: Sequence[Prediction]


def write_contact_sheet(
    path: Path, photos: Sequence[Photo], policies: Mapping[str, Sequence[PrunedRun]]
) -> None:
    """Draw the photographs against the sparsities, in one band for each pruning policy.

    Args:
        path: File of the PNG.
        photos: The rows of each band.
        policies: Name of a policy -> the columns of its band.
    """
    columns = max(len(runs) for runs in policies.values())
    width = MARGIN + columns * (THUMBNAIL + MARGIN)
    band = HEADING + len(photos) * (THUMBNAIL + CAPTION + MARGIN)
    sheet = Image.new("RGB", (width, band * len(policies)), PAPER)
    draw = ImageDraw.Draw(sheet)
    title_font, font = ImageFont.load_default(17), ImageFont.load_default(13)

    for band_index, (policy, runs) in enumerate(policies.items()):
        top = band_index * band
        title = f"{policy}. Green: still seen as by the unpruned model"
        draw.text((MARGIN, top + MARGIN), title, INK, title_font)
        for column, run in enumerate(runs):
            left = MARGIN + column * (THUMBNAIL + MARGIN)
            draw.text((left, top + HEADING - 22), f"{run.achieved:.0%} zeros", INK, font)
            for row, (photo, prediction) in enumerate(zip(photos, run.predictions, strict=True)):
                corner = (left, top + HEADING + row * (THUMBNAIL + CAPTION + MARGIN))
                right = prediction.label == photo.label
                draw_cell(sheet, corner, photo, prediction, RIGHT if right else WRONG)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def draw_cell(
    sheet: Image.Image, corner: tuple[int, int], photo: Photo, prediction: Prediction, colour: str
) -> None:
    """Draw one photograph in a frame of this colour, with the prediction below it."""
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    left, top = corner
    thumbnail = photo.image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    sheet.paste(thumbnail, corner)
    draw.rectangle((left, top, left + THUMBNAIL - 1, top + THUMBNAIL - 1), outline=colour, width=3)
    draw.text((left, top + THUMBNAIL + 2), prediction.class_name, colour, font)
    draw.text((left, top + THUMBNAIL + 18), f"{prediction.probability:.0%}", colour, font)
