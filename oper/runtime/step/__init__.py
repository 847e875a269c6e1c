"""One training step: prepare a batch, read its rows, sum gradients, update owners.

In: a batch of ids, then the gradient of its output. Out: pooled rows, updated rows.
Imports: memory, allreduce, tables, comm, and of plan the address map.
"""
