"""`python -m oper`: the `oper` command, where its script is not on the path."""

from oper.cli import main

main()
