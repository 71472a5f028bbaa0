"""The execution of operators under the plans of their ops, in each of the three modes."""
