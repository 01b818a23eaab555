"""Others' pages: TensorBoard, Weights & Biases, MLflow and Trackio as listeners of the event bus."""
