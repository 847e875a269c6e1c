"""One module a file format, each a source of batches.

In: files. Out: batches of raw values. Imports: base, tables, logs.batches.
"""
