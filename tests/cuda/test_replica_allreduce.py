"""The replicas' AllReduce of ranks on devices, as processes that share a device's memory: the bits
and the bytes counted of CPU ranks'."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from tests.support.cuda.device_engines import device_of
from tests.support.examples import examples
from tests.support.runtime.replica_cases import Case, reduce_case
from tests.support.runtime.worlds import Worlds


def reduce_on_both(rank: int, group: Any, case: Case, library: str | None) -> list[Any]:
    nodes = [0] * case.ranks
    return [
        reduce_case(rank, group, case, "bitmap", nodes, device)
        for device in (device_of(library), None)
    ]


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 4),
    buckets=st.lists(
        st.tuples(st.sampled_from([0, 1, 65, 300]), st.sampled_from([1, 5, 20, 33, 64])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    touched=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=3).map(tuple),
    spread=st.booleans(),
)


@examples(25)
@given(cases)
def test_bits_and_bytes_of_cpu_ranks(ranks: Worlds, library: str | None, case: Case) -> None:
    for (found, counted), (expected, counted_there) in ranks.run(
        case.ranks, reduce_on_both, case, library
    ):
        assert counted == counted_there
        for step, step_there in zip(found, expected, strict=True):
            for bucket, bucket_there in zip(step, step_there, strict=True):
                for part, part_there in zip(bucket, bucket_there, strict=True):
                    assert part.tobytes() == part_there.tobytes()


def refused(rank: int, group: Any, library: str | None) -> str:
    case = Case(1, 2, ((10, 4),), (1.0,))
    with pytest.raises(OperError) as error:
        reduce_case(rank, group, case, "bitmap", [0, 1], device_of(library))
    return str(error.value)


def test_ranks_of_several_hosts_are_refused(ranks: Worlds, library: str | None) -> None:
    for message in ranks.run(2, refused, library):
        assert "2 ranks on devices are of several hosts" in message
