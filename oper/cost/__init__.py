"""The objective: each rank's cost per iteration of a placement of rows.

In: `Workload`, `Topology`, `HolderSets` with the `Sums` of their rows. Out: `Cost` and its parts:
`Charges` (the payers of a read), `AllReduceCost`, `VectorsPerBag`. Imports: base, tables, topology.
Only this package, topology, measure and their displays read link costs.
"""
