"""Rewriting of graphs: inserts the plans of a body's ops, and of the functions that it calls."""
