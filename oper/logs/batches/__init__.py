"""Batches and the columns they are read from: what all formats share.

In: arrays of raw values. Out: `Batch`, `Column`. Imports: base.
"""
