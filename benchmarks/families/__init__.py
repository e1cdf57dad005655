"""What came of every family of models in a small engine, kept as a result and as docs/models.md."""
