"""The state of one thread: who instruments it, where it is, and its modes."""
