"""Watching a live model: the reads of its tables, the fit of its plan, and reports on both.

In: a model that OPER sharded, its plan. Out: a `Profile` of all ranks, a `PeriodReport` for each
period. Imports: torchrec, runtime, planner and below; nothing imports it but the command line.
"""
