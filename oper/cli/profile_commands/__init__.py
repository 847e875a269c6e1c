"""`oper profile` and its sub-commands."""
