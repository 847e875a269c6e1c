"""Fetch paths: the ways in which rows reach the ranks that read them, and gradients their owners.

In: a prepared batch, the heap; then mailboxes of gradients. Out: addresses at which kernels read
the rows, pooled rows, gradients of other nodes. Imports: memory, allreduce, tables, comm.
"""
