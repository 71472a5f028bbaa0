"""The execution of operators under the plans of their ops, and of compiled programs as Python."""
