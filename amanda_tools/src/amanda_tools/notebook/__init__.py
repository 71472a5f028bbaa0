"""Notebooks: the magic ``%%amanda``, after ``%load_ext amanda``."""

from __future__ import annotations

from amanda_tools.notebook.magic import load_ipython_extension

__all__ = ["load_ipython_extension"]
