"""One source of tools and the conformance kit on every backend: docs/backends.md."""
