"""Following the data: drift of a plan's cost, and a new plan with few moves.

In: a `Plan` and a newer `Profile`. Out: `Drift`, `Replanned` with its `RowMoves`. Imports: all of
the planner. Which rows move, and to which slots, is decided in `migration`.
"""
