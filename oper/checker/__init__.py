"""`oper plan check`: does a plan on the disk hold what it promises, alone and against a log?

In: plans, logs. Out: `Findings`. Imports: plan, logs and below; never the planner, as a check must
not share code with what it checks.
"""
