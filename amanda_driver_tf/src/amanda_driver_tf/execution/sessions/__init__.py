"""The graph mode: graphs that a session runs, instrumented by hidden clones."""
