"""One node examined by itself: what is set up wrong, what is broken, and the command that helps (C11)."""
