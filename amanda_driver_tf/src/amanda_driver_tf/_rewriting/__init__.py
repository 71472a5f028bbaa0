"""Graphs rewritten: the plans of the ops of a body, and of the functions it calls, as nodes."""
