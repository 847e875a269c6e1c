"""Segments and heaps, alone and shared by ranks."""

import numpy as np
import torch

from oper.runtime.heap import Heap
from oper.runtime.node import Node


def test_a_heap_of_one_rank() -> None:
    heap = Heap(Node.join(None), np.array([[10], [0], [3]]), [64, 32, 20], [4, 8, 0])
    assert heap.rows(0).shape == (10, 64)
    assert heap.rows(1).shape == (0, 32)
    assert heap.state(2).shape == (3, 0)
    assert not heap.rows(0).any()
    heap.rows(2).fill_(7)
    assert heap.bases[2, 0] == heap.rows(2).data_ptr()
    assert not heap.rows(0).any()
    assert not heap.state(0).any()
    assert torch.equal(heap.bases[:, 1], torch.zeros(3, dtype=torch.int64))
