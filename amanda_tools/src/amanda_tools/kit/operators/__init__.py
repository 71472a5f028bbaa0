"""Support for tools that work per operator: descriptions, accounts, sums and time spent."""
