"""What to do next? The four phases, and who decides about them."""
