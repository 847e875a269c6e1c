"""From wanted rows of each class to rows that move, each with its new slots.

In: a plan's rows by class and holder set, and the rows wanted. Out: the new `Layout`, `RowMoves`,
and the cost of moving. Imports: problem, plan.
"""
