"""The shadow: scores a sample of finished rollouts with the same version unquantized, and tells the monitor."""
