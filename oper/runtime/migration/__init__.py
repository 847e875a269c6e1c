"""Migration: rows go to their places in a new plan, by steps, while a model trains or serves.

In: a plan, and an engine's heap and placement. Out: rows that have moved, and the placement with
their new places.
Imports: base, cost, plan, runtime.comm, runtime.memory, runtime.allreduce.
"""
