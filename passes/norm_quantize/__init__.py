"""The parts of ``fuse_norm_quantize``: what a node computes as a canonical expression, the norms
and quantizations that are known, and the nodes that a match covers."""
