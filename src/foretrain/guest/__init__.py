"""foretrain inside of a training loop that somebody else owns."""
