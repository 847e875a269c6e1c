"""OPER in a TorchRec script: sharders, planner, sharded modules, state dicts.

In: a TorchRec model and a plan or profile. Out: a sharded model. Imports: runtime and planner,
which never import each other.
"""
