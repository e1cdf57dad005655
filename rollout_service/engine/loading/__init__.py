"""How a worker gets a version: reads and checks it while the engine serves, and loads it while it is closed."""
