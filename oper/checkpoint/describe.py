"""`oper checkpoint inspect`: the content of a checkpoint, from its index and marker.

A delta is described by its own touched rows.
"""

from pathlib import Path

from oper.checkpoint.link import Description
from oper.checkpoint.soundness import open_chain


def describe(checkpoint: Path | str) -> Description:
    """Return the content of a checkpoint, or of the newest of a folder of some.

    Raise OperError if there is none, or `open_chain` finds it unsound.
    """
    return open_chain(checkpoint).last
