"""Let me see: listeners of the event bus."""
