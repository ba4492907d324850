"""The parts of ``lower_router_linear``: one file each for what makes a linear a router, what its op
multiplies, and who reads the logits.
"""
