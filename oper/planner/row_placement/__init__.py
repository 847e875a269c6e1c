"""From counts of rows to rows: which are listed, which striped, where each lies.

In: `Profile`, `Problem`, `ClassPlacement`. Out: `RowPlacement`, `Layout`. Imports: class_placement
and below.
"""
