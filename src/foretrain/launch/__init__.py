"""Several processes, started by torchrun or its like: how they find each other, agree, and end together."""
