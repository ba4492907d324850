"""The proofs: one file a claim of the contract, each with ``prove_<claim>(trial)``."""
