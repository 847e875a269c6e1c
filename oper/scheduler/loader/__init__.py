"""Loader that carries out a dispatch: ranks exchange the samples of each global batch.

In: each rank's own loader, a plan, a policy. Out: batches with the samples that this rank trains.
Imports: scheduler, plan, tables, runtime and base.
"""
