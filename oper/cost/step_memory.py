"""Memory of a step on a rank, in addition to its rows, on the processor and on devices.

On the processor it is a mailbox with the slot and the float32 gradient of each distinct row, and
the buffers of the replicas' AllReduce (allreduce.py).

On devices the host would have to wait to learn how many rows a batch reads. So there is room for as
many rows as the batch has accesses, each of the widest dim D. Per access of a rank, a training step
takes

    8 + 8 + 8 + 4 + 4   of each prepared batch: its ids, which are kept until they have been
                        checked to be in range, addresses, the slots of its runs, positions, starts
                        of runs
    8 + 4 + 1           more while one is sorted: sort keys, their numbers, CUB's scratch
    4 + 4 + 4           more while gradients are summed: places of gradients, bags, factors
    2 · 4 · D / 256     and two partial sums for each 256 accesses (csrc/include/oper/step/pieces.h)
    (8 + 4 · D) · 5/4   of its mailbox, which is a quarter longer than the largest batch needed;
                        none for a single rank, whose gradients nobody else reads

Pipelines prepare two batches ahead of the one that is trained. In inference there are only ids and
addresses. If distinct rows are fetched by NVSHMEM, both modes also have runs and the sort,
addresses of the fetched rows, and a buffer of the widest rows, which grows by a quarter more than
needed.

On several nodes lists, rows and gradients of other nodes are in flight. Of a row that a rank
fetches there, for itself or for others of its node, there are up to

    2.5 copies of 8 + 4 · D in inference: as it is sent, as it is received, a quarter more
    5 copies                in training: as it was received; its gradient in parts of mailboxes, in
                            their sum, in messages sent and received. By NVSHMEM: its gradient in a
                            message, and, a quarter more each, as it is left there and as it comes
    60                      of lists, for each access: rows, sort keys, their places

If ranks are identical, a rank fetches as many rows as it reads distinct rows of other nodes.
Measured.

Memory for replicas depends on the method of their AllReduce. There is room for as many touched
replicas as all ranks have accesses, or for all replicas if those are fewer.

    bitmap      a buffer of the touched replicas' gradients, with a quarter to spare, their sums,
                and 8 bytes per slot
    dense       a buffer in which the gradients of all replicas are summed, the sums of touched
                replicas, and twice 8 bytes per slot
    allgather   a message per node, with a quarter to spare, of a gradient and a number of 4 bytes
                for each of the rank's accesses; the numbers of all ranks' messages; sums and slots
                as with bitmap
    all methods 8 bytes of slot and three bits and a half per replica

Batches and outputs belong to the rest of the model.

The runtime uses these sizes too. tests/cuda/test_step_memory.py measures them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from oper.base import native
from oper.cost.allreduce import AllReduceCost
from oper.cost.holder_sets import Sums

# Values per cache line: each bucket's gradients begin at a multiple of it.
LINE_VALUES = native.shared("values of a line", 16)
SLOT_BYTES = 8
NUMBER_BYTES = 4  # of a replica, in messages
_SLACK = 4  # memory that devices share is allocated with a quarter to spare

PREPARED_BATCHES = 3  # one is trained, and pipelines have prepared the others
_ADDRESS_BYTES = 8
_READ_BYTES = 8 + _ADDRESS_BYTES  # of an access of a prepared batch: its id and its address
_RUN_BYTES = SLOT_BYTES + 4 + 4
_SORT_BYTES = 8 + 4 + 1  # of CUB's scratch a fifth of a byte: 256 counters for some 5,000 accesses
_SUM_BYTES = 4 + 4 + 4
_ACCESSES_OF_PARTIAL_SUMS = 256 // 2
# Copies, at one time, of the slot and gradient of a row of another node; and bytes of lists per
# access.
_COPIES_ON_THE_WAY = {False: 2.5, True: 5}  # in inference, in training
_LIST_BYTES = 60
# Per replica: its slot; the bitmap of this rank, that of all ranks, and the rows before each word
# of it.
_REPLICA_BYTES = SLOT_BYTES + (1 + 1 + 1 / 2 + 1) / 8


def most_values(rows: int, dims: Sequence[int]) -> int:
    """Return the most values that `rows` rows in buckets of these dims can have, whichever buckets
    they are in, with the gaps before buckets."""
    return rows * max(dims, default=0) + LINE_VALUES * len(dims)


def with_slack(needed: int) -> int:
    """Return the size to allocate of memory that devices share, if `needed` is needed."""
    return needed + needed // _SLACK


def mailbox_row_bytes(dim: int) -> int:
    """Return the bytes of a row's slot and gradient in a mailbox."""
    return SLOT_BYTES + 4 * dim


class StepMemory(Protocol):
    """Memory of a step on a rank, in addition to its rows."""

    @property
    def batch_bytes(self) -> float:
        """Bytes for all but replicas: `mailbox_bytes` of a plan."""

    def allreduce_bytes(self, method: AllReduceCost, replicas: Sums) -> float:
        """Return the bytes for the gradients of replicas, given their sums as one entry."""


@dataclass(frozen=True)
class ProcessorStep:
    """Step of a rank on the processor, with a mailbox of `mailbox_bytes`."""

    mailbox_bytes: float
    ranks: int

    @property
    def batch_bytes(self) -> float:
        return self.mailbox_bytes

    def allreduce_bytes(self, method: AllReduceCost, replicas: Sums) -> float:
        """Return the bytes of the buffers of a method."""
        return method.memory_bytes(replicas, self.ranks)


@dataclass(frozen=True)
class DeviceStep:
    """Step of a rank on a device, whose batch has `accesses` accesses to rows of at most `dim`
    values. `gradient_ratio`: largest ratio of the bytes of a float32 gradient to those of its row.
    `fetched_row_bytes`: bytes of the widest row if kernels fetch distinct rows, else 0.
    `sent_bytes`: bytes of the slots and gradients of the other nodes' rows that a rank's batch
    reads, if ranks send them, else 0. `nodes`: number of nodes; a rank holds a message of each."""

    accesses: float
    dim: int
    ranks: int
    training: bool
    gradient_ratio: float = 1.0
    fetched_row_bytes: float = 0.0
    sent_bytes: float = 0.0
    nodes: int = 1

    @property
    def batch_bytes(self) -> float:
        """Bytes for all but replicas."""
        lists = _LIST_BYTES * self.accesses if self.sent_bytes else 0.0
        on_the_way = _COPIES_ON_THE_WAY[self.training] * self.sent_bytes + lists
        return self._own_bytes + on_the_way

    @property
    def _own_bytes(self) -> float:
        """Bytes for the work of a rank by itself and with others of its node."""
        prepared, fetched = PREPARED_BATCHES * _READ_BYTES, 0.0
        if self.training or self.fetched_row_bytes:
            prepared += PREPARED_BATCHES * _RUN_BYTES + _SORT_BYTES
        if self.fetched_row_bytes:
            fetched = _ADDRESS_BYTES + self.fetched_row_bytes * (1 + 1 / _SLACK)
        if not self.training:
            return self.accesses * (prepared + fetched)
        summing = _SUM_BYTES + 4 * self.dim / _ACCESSES_OF_PARTIAL_SUMS
        mailbox = mailbox_row_bytes(self.dim) * (1 + 1 / _SLACK) if self.ranks > 1 else 0.0
        return self.accesses * (prepared + fetched + summing + mailbox)

    def allreduce_bytes(self, method: AllReduceCost, replicas: Sums) -> float:
        """Return the bytes for the buffers, lists and sums of a method."""
        count, name = float(replicas.rows), method.method
        if self.ranks == 1 or not count:
            return 0.0
        all_gradients = self.gradient_ratio * float(replicas.row_bytes)
        all_lists = _REPLICA_BYTES * count
        if name == "dense":
            return 2 * all_gradients + 2 * SLOT_BYTES * count + all_lists

        def gradients(rows: float) -> float:
            return min(4 * self.dim * rows, all_gradients)

        touched = min(count, self.ranks * self.accesses)
        sums = gradients(touched) + SLOT_BYTES * touched + all_lists
        if name == "bitmap":
            return sums + min(gradients(touched) * (1 + 1 / _SLACK), all_gradients)
        own = min(count, self.accesses)
        message = gradients(own) + NUMBER_BYTES * own
        held = min(message * (1 + 1 / _SLACK), all_gradients + NUMBER_BYTES * count)
        return sums + self.nodes * held + NUMBER_BYTES * self.ranks * own
