"""The linear programme over holder sets, by column generation, and the prices of its limits.

In: `Classes` and limits. Out: fractions of each class per holder set, `DualPrices`.
Imports: problem.
"""
