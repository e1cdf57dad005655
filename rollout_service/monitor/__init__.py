"""How far the engines are from the trainer, per weight version and replica: measured, kept and judged."""
