"""Save plans and write results of torch.distributed.checkpoint come whole through JSON."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from oper.torchrec.save_plans import plan_from_json, plan_to_json, result_from_json, result_to_json

SIZES = st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size)
INDICES = st.builds(MetadataIndex, st.text(), st.none() | SIZES, st.none() | st.integers(0, 99))
PROPERTIES = st.builds(
    TensorProperties,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool]),
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.booleans(),
    st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format]),
    st.booleans(),
)
TENSORS = st.builds(
    TensorWriteData, st.builds(ChunkStorageMetadata, SIZES, SIZES), PROPERTIES, SIZES
)
ITEMS = st.builds(
    WriteItem,
    INDICES,
    st.sampled_from(WriteItemType),
    st.none() | st.builds(BytesIOWriteData, st.integers(0, 2**62)),
    st.none() | TENSORS,
)
PATHS = st.dictionaries(st.text(), st.lists(st.text() | st.integers(0, 99)).map(tuple))


def fields(value: Any) -> Any:
    """Return all fields of an object of torch: comparison leaves some of them out."""
    return asdict(value)


@given(st.builds(SavePlan, st.lists(ITEMS), st.none(), PATHS))
def test_plans(plan: SavePlan) -> None:
    there = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert there == plan
    assert fields(there) == fields(plan)


@given(
    st.builds(
        WriteResult,
        INDICES,
        st.integers(0, 2**62),
        st.builds(_StorageInfo, st.text(), st.integers(0, 2**62), st.integers(0, 2**62)),
    )
)
def test_results(result: WriteResult) -> None:
    there = result_from_json(json.loads(json.dumps(result_to_json(result))))
    assert there == result
    assert fields(there) == fields(result)


def test_plans_of_the_planner_of_torch() -> None:
    """The JSON has all fields that torch's planner sets."""
    state = {
        "layers": {"weight": torch.zeros(3, 2), "half": torch.zeros(1, dtype=torch.float16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
        "epoch": 3,
        "random": np.random.default_rng(0).bit_generator.state,
        "nothing": None,
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    plan = planner.create_local_plan()
    assert {item.type for item in plan.items} >= {WriteItemType.TENSOR, WriteItemType.BYTE_IO}
    assert ("optimizer", "state", "0", "step") in plan.planner_data.values()
    there = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert fields(there) == fields(plan)
