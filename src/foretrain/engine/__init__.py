"""One full step, fast and exact; and the whole state, on disk and in memory."""
