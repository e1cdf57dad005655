"""Weight versions on disk: the log that every replica follows, and copies of it on other nodes."""
