"""The one home of the objective: what a placement of rows costs each rank per iteration.

In: `Workload`, `Topology`, `HolderSets` with the `Sums` of their rows. Out: `Cost`, and what it is
made of: `Charges` (who pays for a read), `AllReduceCost`, `VectorsPerBag`. Imports: base, tables,
topology. Nothing outside this package, topology, measure and what displays them reads link costs.
"""
