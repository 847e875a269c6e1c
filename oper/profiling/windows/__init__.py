"""Windows of a log: equal parts by number of samples, or spans of a column of times.

In: batches with their positions. Out: the window of each sample. Imports: base, logs.
"""
