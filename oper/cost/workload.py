"""What one iteration is: training or inference, how rows are fetched, and the global batch."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from oper.base.defaults import BATCH_SIZE
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.base.units import whole_number

MOST_SAMPLES = 2**40  # of a batch; more than a log has, and products with counts stay finite


Fetch = Literal["raw", "distinct", "pooled", "auto"]
FETCHES: tuple[Fetch, ...] = get_args(Fetch)


def usual_fetch(nodes: int) -> Fetch:
    """How rows are fetched unless it is said: ranks of one node read every access through a
    pointer, and between nodes each row travels once a batch."""
    return "raw" if nodes == 1 else "distinct"


@dataclass(frozen=True)
class Workload:
    """What one iteration is: mode, how rows are fetched, and the global batch in samples.

    Without `fetch` rows are fetched as is usual on the topology that is planned for: raw on one
    node; on several distinct, or auto if tables can be pooled there. A plan has the one that it was
    made for. Pooled: the ranks of another node add up the rows of each bag, and send one vector
    (oper/topology/pooled_links.py). Auto: tables are pooled if that makes the step shorter by
    `POOLED_GAIN` (oper/base/defaults.py), and fetched as is usual otherwise; a plan
    then says which are pooled.
    """

    mode: Literal["training", "inference"]
    fetch: Fetch | None = None
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        if self.mode not in ("training", "inference"):
            raise OperError(f"{option('--mode', self.mode)}: expected 'training' or 'inference'")
        if self.fetch not in (*FETCHES, None):
            raise OperError(
                f"{option('--fetch', self.fetch)}: expected 'raw', 'distinct', 'pooled' or 'auto'"
            )
        size = whole_number(self.batch_size, "batch size")
        object.__setattr__(self, "batch_size", size)
        if not 1 <= size <= MOST_SAMPLES:
            raise OperError(f"batch size: expected 1 to {MOST_SAMPLES:,} samples, got {size:,}")

    def on(self, nodes: int) -> "Workload":
        """This workload on so many nodes: with the fetch that is usual there, if it has none. On
        one node pooled rows are read by pointer, as raw ones."""
        pooled_for_nothing = self.fetch in ("pooled", "auto") and nodes == 1
        if self.fetch is None or pooled_for_nothing:
            return replace(self, fetch=usual_fetch(nodes))
        return self

    def unpooled(self, nodes: int) -> "Workload":
        """Return this workload on so many nodes if no table is pooled: rows are fetched as it says,
        or as is usual there."""
        fetch = None if self.fetch in ("pooled", "auto") else self.fetch
        return replace(self, fetch=fetch).on(nodes)

    @property
    def known_fetch(self) -> Fetch:
        """How rows are fetched, of a workload that is on some nodes."""
        if self.fetch in (None, "auto"):
            raise OperError(
                "workload: without fetch, or with 'auto', it depends on the topology and the data; "
                "give 'raw', 'distinct' or 'pooled', or Workload.on(topology.nodes)"
            )
        return self.fetch

    @property
    def training(self) -> bool:
        return self.mode == "training"
