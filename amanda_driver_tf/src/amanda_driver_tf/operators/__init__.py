"""Facts about op types: their arguments by position, and what their results mean."""
