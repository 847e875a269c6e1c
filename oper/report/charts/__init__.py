"""Charts of a report, as data that Vega draws.

In: figures of a plan or of a command's JSON. Out: `Chart`s. Imports: planner and below.
"""
