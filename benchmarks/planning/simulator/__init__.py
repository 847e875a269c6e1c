"""An independent simulator of one iteration: flows over the memories, links and adapters of ranks.

In: a `Placement` of rows, the samples of a `Log`, a `Machine`. Out: `Iteration`, seconds by phase.
It tests the cost model (oper/cost/), so that it imports nothing of it and nothing of the planner,
and its constants come from what others published, not from a fit
(tests/benchmarks/test_simulator_imports.py).
"""
