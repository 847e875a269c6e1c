"""Migration: rows and their optimizer state go from where they are to where a new plan has them,
in steps between iterations, while the model trains or serves.

A step moves some rows: changed_rows.py says which differ, schedule.py which of them a step moves
and into which slots, movable_rows.py how the address map follows, and row_migration.py moves them.
"""
