"""One module for each file format; each is a source of batches.

In: files. Out: batches of raw values. Imports: base, tables, logs.batches.
"""
