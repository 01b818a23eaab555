"""What was trained, at work: text from it, adapters on it, scores of it."""
