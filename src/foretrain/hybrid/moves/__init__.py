"""Ways to move weights without a plain full step."""
