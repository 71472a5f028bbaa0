"""Support for tools that keep something by weight: files, copies, coverage, writes, learning."""
