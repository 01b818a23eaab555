"""What it is trained on: documents, tokens, batches."""
