"""The execution of operators under the plans of their ops: imperative ones, and those of graphs."""
