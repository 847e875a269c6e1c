"""The runtime: a plan becomes a distributed shared memory, and a training step on it (§5).

In: `Plan`, batches of ids, gradients. Out: pooled rows, updated tables. Imports: plan, tables,
base; never planner, profiling or torchrec.
"""
