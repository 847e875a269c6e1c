"""`oper profile` and `oper profiles`."""
