"""The ingest: the only process that writes the log. It receives, converts and commits trainers' weights."""
