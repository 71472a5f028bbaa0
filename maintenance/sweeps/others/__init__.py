"""Tests that others wrote for their own frameworks, run plain and under tools that change nothing.

Run `python -m maintenance.sweeps.others torch --from FOLDER` from the repository's root, or
`nox -s others`. The tests are never part of this repository: they come with an installed package or
from a folder.
"""
