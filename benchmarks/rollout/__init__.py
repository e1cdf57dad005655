"""What the service makes of the tokens/s of its engine, and what becomes of its rollouts."""
