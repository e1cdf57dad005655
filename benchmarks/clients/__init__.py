"""What came of driving the service with other people's clients, kept as a result."""
