"""Number of rows of each class per holder set, before rows are named (§4).

In: `Problem`. Out: `ClassPlacement`. Imports: problem, lp.
"""
