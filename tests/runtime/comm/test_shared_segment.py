"""Memory that ranks share: which may be made read-only."""

import os

import pytest
import torch

from oper.base import native

PAGE = os.sysconf("SC_PAGESIZE")


def test_memory_of_torch_is_not_protected() -> None:
    memory = torch.zeros(3 * PAGE, dtype=torch.uint8)
    at_page = memory[-memory.data_ptr() % PAGE :][:PAGE]  # others' memory may lie beside it
    assert at_page.data_ptr() % PAGE == 0
    with pytest.raises(ValueError, match="must be a segment's, and torch allocated it"):
        native.ops().protect(at_page, False)
    at_page.fill_(1)


def test_a_segment_is_readable_while_it_is_protected() -> None:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, PAGE)
        memory = native.ops().map_segment(descriptor, PAGE)
    finally:
        os.close(descriptor)
    memory.fill_(3)
    native.ops().protect(memory, False)
    assert bool((memory == 3).all())
    native.ops().protect(memory, True)
    memory.fill_(4)
