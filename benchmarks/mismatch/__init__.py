"""How far engines' log-probabilities are from the trainer's, and whether the service notices."""
