"""One whole run: its beginning, its steps, its evaluations, its checkpoints and its end."""
