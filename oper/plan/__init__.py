"""A plan and how it is read: layout, address map, row codes, the folder on disk.

In: a layout from the planner, or a plan's folder. Out: `Plan`, `AddressMap`, `RowLocator`.
Imports: base, files, tables, topology, cost. All that planner and runtime know of each other is
here.
"""
