"""The smallest plan that a device can translate by."""

import numpy as np

from oper.plan.address_map import AddressMap
from oper.plan.layout import rank_map
from tests.support.planner.layouts import random_layout, tables_of


def address_map(rows: int) -> AddressMap:
    """Of one table on two ranks, for rank 0."""
    layout = random_layout(np.random.default_rng(1), [rows], 2)
    return AddressMap(tables_of(layout), layout, rank_map(layout, 0))
