"""Sources of the tensors of a version."""
