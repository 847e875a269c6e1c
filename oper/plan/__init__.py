"""A plan and how to read it: layout, address map, row codes, the folder on disk.

In: a layout from the planner, or a plan's folder. Out: `Plan`, `AddressMap`, `RowLocator`.
Imports: base, files, tables, topology, cost. Planner and runtime share nothing but this package.
"""
