"""Tools for an existing plan: check, replay of a log, explain, diff.

In: plans, logs. Out: findings and reasons. Imports: plan, logs and below; never the planner, as a
check must not share code with what it checks.
"""
