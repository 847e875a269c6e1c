"""`oper plan check`: verification of a plan on disk, alone and against a log.

In: plans, logs. Out: `Findings`. Imports: plan, logs and below; never the planner, because a check
must not share code with what it checks.
"""
