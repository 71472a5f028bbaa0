"""The graph mode: graphs that a session runs, of which hidden clones run instead."""
