"""What the benchmarks share: where results go, how engines and services start, how time is taken."""
