"""The sparse AllReduce of the replicas' gradients, locally aggregated (§5.3).

In: slots and gradients of touched replicas. Out: their sums, bit-equal on all ranks. Imports: comm,
tables.
"""
