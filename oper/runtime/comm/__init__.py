"""Communication of ranks: shared segments, messages, signals, collectives; deadlines on every wait.

In: a process group. Out: `Node`, `Signals`, `AllToAll`, errors that name the lost rank.
Imports: base.
"""
