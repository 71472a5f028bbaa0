"""The drivers over the versions of their frameworks: docs/support.md."""
