"""The parts of ``lower_router_topk``: what a router's logits become, and which choice of experts
that is."""
