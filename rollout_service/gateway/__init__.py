"""HTTP in: one file per surface, validation, authorization. It picks no replica itself."""
