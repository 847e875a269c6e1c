"""Training with cached rows: execution of the caches' moves on the rows of a plan's tier.

In: batches and their gradients, from the engine, whose row source this is. Out: the places of the
batch's rows, and rows of the tier that are up to date when they are needed. Imports: runtime and
the scheduler's caches.
"""
