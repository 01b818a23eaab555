"""The linearised run: rows of the Jacobian, and the damped step to where the linearised residuals are least."""
