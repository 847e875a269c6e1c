"""The one home of the objective: what a placement of rows costs each rank per iteration.

In: `Workload`, `Topology`, `HolderSets` with the `Sums` of their rows. Out: `Cost`. Imports: base,
topology. Nothing outside this package, topology, measure and what displays them reads link costs.
"""
