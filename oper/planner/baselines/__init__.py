"""Placements that others use, priced by the same cost (§6.4).

In: `Problem`. Out: `Baseline`. Imports: problem, class_placement.partition.
"""
