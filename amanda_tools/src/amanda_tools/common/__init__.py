"""What several tools need: facts of operators, tensors of any framework, forms of results."""
