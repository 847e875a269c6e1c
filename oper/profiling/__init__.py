"""From a log to a profile: how often each row is accessed, and how many samples contain it.

In: batches of row ids. Out: `Profile`, a folder of counters. Imports: base, tables, topology and
cost (for the distinct rows to expect), logs.
"""
