"""Programs for those who maintain the repository; run them from its root by `python -m`."""
