"""The parts of ``fuse_norm_quantize``: the quantizations that are known, and where they are."""
