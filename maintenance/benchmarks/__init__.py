"""What instrumentation costs, and figures of the pages of tools: docs/benchmarks."""
