"""The documentation's site: `nox -s docs`, and the pages that are made of the sources."""
