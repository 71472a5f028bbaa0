"""What belongs to one thread: who watches it, where it is, the modes that are set in it."""
