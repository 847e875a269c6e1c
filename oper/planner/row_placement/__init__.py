"""From counts of rows to rows: the listed ones, the striped ones, and the place of each.

In: `Profile`, `Problem`, `ClassPlacement`. Out: `RowPlacement`, `Layout`. Imports: class_placement
and below.
"""
