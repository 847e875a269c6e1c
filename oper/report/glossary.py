"""The words of a report, explained to those who have not seen oper before."""

from collections.abc import Sequence

from oper.plan.plan import Plan
from oper.planner.compare import Comparison

UPDATING = "updating rows"
WORDS = (
    ("rank", "a process with its device; it holds a part of the rows"),
    ("step", "a batch through all ranks: reads of rows, and in training their updates"),
    (
        "transfer time",
        "transfers of rows and gradients in a step, summed on the slowest rank; plans minimise it",
    ),
    (
        "replicated row",
        "has a copy on several ranks, mostly on all: they need not fetch it",
    ),
    ("listed row", "is on one rank, and was placed there one by one: mostly a hot row"),
    (
        "striped row",
        "is on one rank: mostly a cold row; these are dealt out to the ranks in turn",
    ),
    ("extra memory", "bytes of copies beyond one of each row, as a share of one copy of all rows"),
    (
        "raw, distinct fetches",
        "every access reads its row; or a rank reads each row once a batch, however often named",
    ),
    ("looking rows up", "reading the rows that a rank holds, for itself and for others"),
    ("fetching rows", "bringing rows of other ranks over the links"),
    (
        UPDATING,
        "sending gradients to the rows' owners, adding them up (for replicated rows by AllReduce) "
        "and writing the rows",
    ),
    (
        "above the proved bound, at most",
        "how much longer a plan takes than a time that was proved to be out of reach for all plans "
        "within the same memory; so the best plan is at most so much faster",
    ),
)
METHODS = (
    (
        ("paper",),
        "the paper's procedure",
        "that of OPER's paper (USENIX ATC 2024) as it was published",
    ),
    (
        ("memory_greedy", "access_greedy"),
        "memory-greedy, access-greedy",
        "whole rows, each to the rank with the least memory or work",
    ),
    (
        ("table_wise", "row_wise"),
        "table-wise, row-wise",
        "each table on one rank; the rows of each table in equal parts on all ranks",
    ),
    (("torchrec",), "TorchRec's planner", "tables whole, in parts or on all ranks, as it chooses"),
    (("milp",), "exact solver (MILP)", "an integer programme, solved as far as time allows"),
)


def words_of(plan: Plan, runs: Sequence[Comparison]) -> list[tuple[str, str]]:
    """Return the words that occur on the page, those of training and of compared methods too."""
    known = [word for word in WORDS if plan.workload.training or word[0] != UPDATING]
    compared = {name for run in runs for name in run.methods}
    return known + [(word, said) for names, word, said in METHODS if compared & set(names)]
