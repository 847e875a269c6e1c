"""Defaults that a command and a function of Python share; each is declared only here."""

DIM = 64  # values of a row
BATCH_SIZE = 65_536  # samples of an iteration, over all ranks
THRESHOLD = 0.001  # of all bytes or accesses: the largest partition
DOB = 0.999  # degree of balance at which partitions are fine enough
DTYPE = "fp32"
OPTIMIZER = "rowwise_adagrad"
RANKS = 8  # that share a batch whose distinct rows are measured, or the lookups of a sample
EVERY = "1d"  # of a window by a column of times
# Above any use that we know (a day a window is three years); while the log is counted each window
# has counters of all rows, so a wrong unit of time would fill the disk.
MAX_WINDOWS = 1000
# Share of a step that another plan must save before this one is to be replaced. With 0.002 a
# monitor of an unchanged log took chance for drift; with 0.01 none of 2,400 shuffled logs would
# have been replanned (by transfer times: docs/monitor.md).
WORSE = 0.01
HORIZON = 10_000  # iterations within which a move must save the cost of its bytes
MOST_STEPS = 10**12  # of a horizon: four months of steps of 10 µs
# Share of the step: for less no table is pooled, because pooled sums are in another order. The
# plans that this allows took 0.736 to 0.940 of the distinct plans' steps on later data
# (docs/design/fetch-by-table.md).
POOLED_GAIN = 0.05
LIMIT_SECONDS = 60.0  # of a compared method that may take long
DEADLINE = "1h"  # of a rank that waits for the others' counts
