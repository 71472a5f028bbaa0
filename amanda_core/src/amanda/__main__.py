"""`python -m amanda`: the same as the program `amanda`."""

from __future__ import annotations

from amanda_core.cli import main

if __name__ == "__main__":
    main()
