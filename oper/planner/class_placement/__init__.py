"""How many rows of each class go to each holder set, before rows are named (§4).

In: `Problem`. Out: `ClassPlacement`. Imports: problem, lp.
"""
