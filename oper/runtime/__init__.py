"""The runtime: a plan becomes a running system (OPER, §5)."""
