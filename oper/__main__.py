"""The entry point of the `oper` script and of `python -m oper`.

It imports the commands when it has prepared for what may befall a process from its first moment
on; what they end in is the matter of oper/cli/__init__.py.
"""

import contextlib
import os


def main() -> None:
    """Run the command line."""
    try:
        from oper.base import open_files, standard_streams

        with standard_streams.guarded():
            open_files.check()
            from oper.cli import main as run

            run()
    except KeyboardInterrupt:
        # In the middle of an import: commands end by themselves. What is half imported need not be
        # able to clean up.
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted; nothing was left half-written\n")
        os._exit(130)


if __name__ == "__main__":
    main()
