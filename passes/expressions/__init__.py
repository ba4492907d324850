"""What a node of the graph computes, as a canonical expression that no spelling changes, and
patterns that are matched with it."""
