"""What the commands do: train, finetune, evaluate, and open a model."""
