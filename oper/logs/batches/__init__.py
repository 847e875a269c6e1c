"""Batches and the columns from which they are read, shared by all formats.

In: arrays of raw values. Out: `Batch`, `Column`. Imports: base.
"""
