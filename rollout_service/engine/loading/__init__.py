"""Loading of a version in a worker: staged and checked while the engine serves, then loaded while it is paused."""
