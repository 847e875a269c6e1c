"""The sparse AllReduce of the replicas' gradients, locally aggregated (§5.3).

In: a batch's rows and their gradients. Out: sums of the replicas', bit-equal on all ranks. Imports:
comm, tables, memory.
"""
