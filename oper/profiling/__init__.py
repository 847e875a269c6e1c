"""From a log to a profile: the accesses of each row, and the number of samples that contain it.

In: batches of row ids. Out: `Profile`, a folder of counters. Imports: base, tables, topology and
cost (for the distinct rows to expect), logs.
"""
