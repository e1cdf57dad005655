"""The log of weight versions: what a version is, how it arrives, how it is kept, how replicas follow it."""
