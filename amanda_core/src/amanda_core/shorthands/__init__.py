"""Ways to write a tool without a class of it."""
