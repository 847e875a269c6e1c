"""Which rows the ranks of a node need of other nodes together, and where one of them has these, on
a device: what the processor's operators unite_slots and find_united do (row_relay.py), in torch.

A group is a bucket's rows of one owner. To treat all groups at once, a slot is searched for by its
KEY: the number of its group, in the order asked for, above the bits of the slot. How many rows each
group has is in the host's memory.
"""

from collections.abc import Sequence

import torch

from oper.plan.layout import SLOT_BITS, SLOT_MASK


def unite_slots(
    slots: Sequence[torch.Tensor], before: Sequence[torch.Tensor], groups: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct slots that any of the lists has in some groups, ascending, group after group,
    and how many there are before each, int64 [groups + 1] on the host. Group g of a list is
    slots[before[g] : before[g + 1]], `before` on the host."""
    keys = torch.cat([_keys(*given, groups)[0] for given in zip(slots, before, strict=True)])
    united = torch.unique(keys)
    first_keys = torch.arange(len(groups) + 1, device=united.device) << SLOT_BITS
    return united & SLOT_MASK, torch.searchsorted(united, first_keys).cpu()


def find_united(
    targets: torch.Tensor,
    slots: torch.Tensor,
    before: torch.Tensor,
    groups: Sequence[int],
    united: torch.Tensor,
    united_before: torch.Tensor,
    fields: Sequence[int],
    firsts: Sequence[int],
) -> None:
    """Say in `targets` [rows] where rows that came for several ranks lie: those of groups[i], all
    of which are of the united group i, in slot firsts[i] of fields[i] and on, in the united
    order."""
    mine, rows, number = _keys(slots, before, groups)
    theirs, _, _ = _keys(united, united_before, range(len(groups)))
    first = torch.tensor(firsts, dtype=torch.int64) - united_before[: len(groups)]
    field = torch.tensor(fields, dtype=torch.int64) << SLOT_BITS
    base = (field + first).to(slots.device)
    targets[rows] = base[number] + torch.searchsorted(theirs, mine)


def _keys(
    slots: torch.Tensor, before: torch.Tensor, groups: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys of the slots of some groups, where these are in the list, and which of the groups
    each is of."""
    chosen = torch.tensor(groups, dtype=torch.int64)
    begins, counts = before[chosen], before[chosen + 1] - before[chosen]
    total = int(counts.sum())
    # One copy to the device: of each group, and where its slots come in the list of keys.
    shift = begins - (counts.cumsum(0) - counts)
    there = torch.stack([counts, shift]).to(slots.device)
    each = torch.arange(len(groups), device=slots.device)
    number = each.repeat_interleave(there[0], output_size=total)
    rows = torch.arange(total, device=slots.device) + there[1][number]
    return number << SLOT_BITS | slots[rows], rows, number
