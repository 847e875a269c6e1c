"""OPER's planner with TorchRec's interface: its inputs, and the statistics that it logs.

In: a TorchRec model and a profile. Out: a plan in TorchRec's form. Imports: planner, profiling,
topology, and the sharders.
"""
