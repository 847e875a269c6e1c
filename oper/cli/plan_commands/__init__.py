"""`oper plan` and its sub-commands."""
