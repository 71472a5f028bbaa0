"""Operators as tools see them: what tells one from another, an account of each, their sums."""
