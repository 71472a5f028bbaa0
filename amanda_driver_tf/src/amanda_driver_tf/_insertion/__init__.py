"""What is inserted into a graph: new nodes, what they compute, and how they are written."""
