"""The fault matrix: everything that can break, broken under load, and what it cost."""
