"""The ranks: their nodes, link costs and capacities; from presets, YAML files or measurements.

In: a preset's name or a YAML file. Out: `Topology`. Imports: base, files.
"""
