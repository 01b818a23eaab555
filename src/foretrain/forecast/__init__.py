"""Where is a run going? Loss curves, the law that they follow under a plan of learning rates, and forecasts."""
