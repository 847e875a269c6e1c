"""The planning problem: classes of interchangeable rows and the limits that bind.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Problem`, `Classes`. Imports: nothing
else of the planner.
"""
