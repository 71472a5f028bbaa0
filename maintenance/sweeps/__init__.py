"""Sweeps: run everything that exists plain and instrumented, and compare.

Run `python -m maintenance.sweeps` from the repository's root, or `nox -s sweep`. Each part writes
its results as JSON, and `report` makes trust.md from them.
"""
