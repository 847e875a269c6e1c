"""Diagnosis before a job: fit of a plan, a model and the machines, with remedies.

In: a plan's folder, a Python file that makes the model. Out: findings. Imports: torchrec, runtime
and below, whose rules it applies; never the planner.
"""
