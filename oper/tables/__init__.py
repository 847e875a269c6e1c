"""Embedding tables: rows, width, optimizer, features; from YAML, published facts or a model.

In: files, TorchRec modules. Out: `Table`. Imports: base, files.
"""
