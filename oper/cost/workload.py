"""The workload of one iteration: training or inference, the fetch of rows, the global batch."""

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
    """Return the default fetch: ranks of one node read every access through a pointer, and between
    nodes each row travels once a batch."""
    return "raw" if nodes == 1 else "distinct"


@dataclass(frozen=True)
class Workload:
    """One iteration: mode, fetch of rows, and the global batch in samples.

    Without `fetch` the topology of the plan decides: raw on one node; on several nodes distinct, or
    auto if tables can be pooled there. A plan has the fetch that it was made for. Pooled: the ranks
    of another node add up the rows of each bag and send one vector (oper/topology/pooled_links.py).
    Auto: tables are pooled if that makes the step shorter by `POOLED_GAIN` (oper/base/defaults.py),
    and otherwise have the default fetch; a plan then names the pooled tables.
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
        """Return this workload on `nodes` nodes: with the default fetch there, if it has none. On
        one node pooled rows are read by pointer, like raw ones."""
        pooled_for_nothing = self.fetch in ("pooled", "auto") and nodes == 1
        if self.fetch is None or pooled_for_nothing:
            return replace(self, fetch=usual_fetch(nodes))
        return self

    def unpooled(self, nodes: int) -> "Workload":
        """Return this workload on `nodes` nodes if no table is pooled: with its own fetch, or the
        default one there."""
        fetch = None if self.fetch in ("pooled", "auto") else self.fetch
        return replace(self, fetch=fetch).on(nodes)

    @property
    def known_fetch(self) -> Fetch:
        """Fetch of rows, for a workload that is on some number of nodes."""
        if self.fetch in (None, "auto"):
            raise OperError(
                "workload: without fetch, or with 'auto', it depends on the topology and the data; "
                "give 'raw', 'distinct' or 'pooled', or Workload.on(topology.nodes)"
            )
        return self.fetch

    @property
    def training(self) -> bool:
        return self.mode == "training"
