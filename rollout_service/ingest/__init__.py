"""The one process that writes the log: takes weights in from trainers, converts and commits them."""
