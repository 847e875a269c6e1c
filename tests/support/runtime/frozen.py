"""To be imported last by a process that others are forked from: what it has imported is never
garbage, and these do not look through it for some each time that they collect."""

import gc

gc.collect()
gc.freeze()
