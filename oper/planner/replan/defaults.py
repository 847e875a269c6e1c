"""What `oper drift`, `oper replan` and their functions take where nothing else is said."""

WORSE = 0.05  # share by which a plan may be worse than one from scratch before it is to be replaced
HORIZON = 10_000  # iterations within which a move must save what its bytes cost
