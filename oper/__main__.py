"""The entry point of the `oper` script and of `python -m oper`.

It imports the commands when it has prepared for what may befall a process from its first moment
on; what they end in is the matter of oper/cli/__init__.py.
"""

from oper.base import standard_streams


def main() -> None:
    """Run the command line."""
    with standard_streams.guarded():
        from oper.cli import main as run

        run()


if __name__ == "__main__":
    main()
