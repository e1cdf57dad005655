"""What trainings through the service come to."""
