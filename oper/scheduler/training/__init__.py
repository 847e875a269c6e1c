"""Training with cached rows: the caches' moves carried out, on the rows of a plan's tier.

In: batches and their gradients, from the engine, whose row source this is. Out: where the batch's
rows are, and rows of the tier that are up to date when they are needed. Imports: runtime and the
scheduler's caches.
"""
