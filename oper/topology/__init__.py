"""The ranks: nodes, link costs, capacities; from presets, YAML or measurements.

In: a preset's name or a YAML file. Out: `Topology`. Imports: base, files.
"""
