"""What the claim of trust rests on: what exists is run plain and instrumented, and compared.

`python -m sweeps` from the repository's root, or `nox -s sweep`. Each part writes its results as
JSON; `report` makes docs/trust.md of them.
"""
