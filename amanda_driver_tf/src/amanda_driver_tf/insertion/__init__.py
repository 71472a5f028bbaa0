"""Insertions into a graph: new nodes, their computation, and how they are written."""
