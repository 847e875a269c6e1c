"""From a profile to a plan: classes, class placement, rows, bound, plan.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`, with its certificate, and
`Plan`. Imports: profiling, plan, cost and below; never runtime.
"""
