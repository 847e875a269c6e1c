"""A plan with a tier as two plans, of the tables on devices and of those in the hosts' memory.

In: a `Plan` with a tier, or the two plans. Out: the two, or the one. Imports: plan and below.
"""
