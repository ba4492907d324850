"""Measure every kernel of an op on this GPU, and write the table that ``ops/device_tables.py``
reads.
"""
