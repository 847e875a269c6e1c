"""Boards: posting, waiting, and how waits end when a rank does not come."""

from oper.runtime.board import Board
from oper.runtime.node import Node


def test_a_board_of_one_rank() -> None:
    board = Board(Node.join(None), ["published", "applied"])
    board.wait("applied", 0, "begin")
    board.post("published", 3)
    board.wait("published", 3, "publish its gradients")
