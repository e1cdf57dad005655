"""The shadow engine: scores a sample of finished rollouts with the unquantized version, and reports to the monitor."""
