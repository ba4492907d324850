"""The norms that are known, the nodes that a match covers, and how an op comes in their place."""
