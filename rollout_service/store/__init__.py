"""Weight versions on disk: the log, which is the truth that every replica follows, and copies of it on other nodes."""
