"""How do weights move? Their directions, window by window, and how well they can be forecast."""
