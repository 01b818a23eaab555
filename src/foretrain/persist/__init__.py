"""What survives: files that are whole or not there, checkpoints, run folders."""
