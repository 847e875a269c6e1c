"""What a log holds, as plain lists, for tests of logs."""

import itertools
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings

from oper.logs.batches.batch import Jagged

Bags = list[list[Any]]
within_a_function = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def lists_of(ids: Jagged) -> Bags:
    values = ids.values
    plain = values.to_pylist() if isinstance(values, pa.Array) else values.tolist()
    ends = ids.offsets()
    return [plain[a:b] for a, b in itertools.pairwise(ends)]


def everything(batches: Any) -> dict[str, Bags]:
    """All samples of all batches, by feature."""
    result: dict[str, Bags] = {}
    for batch in batches:
        for name, ids in batch.features.items():
            bags = lists_of(ids)
            assert len(bags) == batch.samples
            result.setdefault(name, []).extend(bags)
    return result
