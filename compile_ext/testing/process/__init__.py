"""The child process that runs the op, and what the parent and it say to each other."""
