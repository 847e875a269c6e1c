"""Watching a live model: what its tables are read, whether its plan still fits, and who is told.

In: a model that OPER sharded, its plan. Out: a `Profile` of all ranks, a `PeriodReport` for each
period. Imports: torchrec, runtime, planner and below; nothing imports it but the command line.
"""
