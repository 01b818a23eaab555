"""Which settings are best? Many runs in pieces: halved by rank, paused and gone on with, audited."""
