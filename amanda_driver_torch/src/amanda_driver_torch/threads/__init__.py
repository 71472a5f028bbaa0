"""The state of one thread: its attachment, the modules that are running, and its modes."""
