"""What came of the tests that need a GPU, kept as a result."""
