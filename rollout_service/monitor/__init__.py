"""The mismatch between engines and trainer, per weight version and replica: measured, stored and judged."""
