"""Where the tensors of a version come from."""
