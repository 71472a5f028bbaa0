"""One execution of one operator under the plans of its op."""
