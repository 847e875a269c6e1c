"""The memory of a plan where none was asked for: what the devices hold, and how little is enough.

In: `Problem`. Out: `Problem`s with the capacities of the devices and a share of extra memory.
Imports: problem, class_placement, bounds; cost and topology.
"""
