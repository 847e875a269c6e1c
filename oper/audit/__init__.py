"""What is said of a plan that exists: check, replay of a log, explain, diff.

In: plans, logs. Out: findings and reasons. Imports: plan and below, never the planner: a check that
shares code with what it checks finds nothing.
"""
