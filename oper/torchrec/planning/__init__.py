"""OPER's planner as TorchRec calls one: what it plans from, and the statistics that it logs.

In: a TorchRec model and a profile. Out: a plan in TorchRec's form. Imports: planner, profiling,
topology, and what shards by the plan.
"""
