"""Before a job: whether a plan, a model and the machines fit each other, and what to do if not.

In: a plan's folder, a Python file that makes the model. Out: findings. Imports: torchrec, runtime
and below, whose rules these are; never the planner.
"""
