"""What an operator is, and the positions of its arguments. Does not depend on sessions."""
