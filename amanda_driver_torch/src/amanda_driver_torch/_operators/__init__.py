"""What an operator is, and the positions of its arguments. It knows of no session."""
