"""One session's attachment to torch: start, end, operators, calls of modules."""
