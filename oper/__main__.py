"""`python -m oper`: the `oper` command, where its script is not on the path."""

from oper.cli import main

if __name__ == "__main__":
    main()
