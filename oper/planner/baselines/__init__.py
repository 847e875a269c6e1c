"""Placements that others use, priced by the same cost (§6.4); all of them in `registry.py`.

In: `Problem`. Out: `Baseline`. Imports: problem, class_placement.partitions.
"""
