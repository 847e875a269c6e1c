"""A plan explained on one HTML page: sentences, charts, tables, proofs and omissions.

In: plans, a profile, and the results of `oper compare`, `oper drift` and `oper.counters`. Out: a
self-contained file. Imports: planner, checker and below; never the runtime.
"""
