"""Damaged files through every reader, wild arguments through every operator: `make fuzz`."""
