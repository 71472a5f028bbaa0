"""Record what benchmarks wrote, and renew the figures that other pages repeat.

`--stale` only lists results that are older than 30 days, or than a change in what they measure.
`--of NAME --commit COMMIT` says at which commit results were measured, also if they are the same as
before.
"""

from __future__ import annotations

import argparse
import datetime
import sys

from . import MEASURED, filled, pages, record, stale, summaries


def main() -> int:
    """Record and renew, or list what is stale and return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stale", action="store_true", help="list results that are too old")
    parser.add_argument("--of", choices=MEASURED, help="record this result")
    parser.add_argument("--commit", default="HEAD", help="where it was measured")
    options = parser.parse_args()
    if options.of:
        record(options.of, options.commit)
    if options.stale:
        found = list(stale(datetime.datetime.now(tz=datetime.UTC).date()))
        print("\n".join(found) or "No result is stale.")
        return int(bool(found))
    renew()
    return 0


def renew() -> None:
    """Record what was measured, and renew the pages that repeat it."""
    for name in MEASURED:
        record(name)
    summaries.renew()
    for page in pages():
        text = page.read_text("utf-8")
        if (renewed := filled(text)) != text:
            page.write_text(renewed, "utf-8")
            print(f"Renewed {page.name}")


if __name__ == "__main__":
    sys.exit(main())
