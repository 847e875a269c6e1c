"""A DLRM trained by a plan on 4 ranks ranks held-out clicks as the unsharded one does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from oper.plan.plan import Plan
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.commands import fine

RANKS = 4


@pytest.mark.slow
def test_held_out_auc_is_that_of_the_unsharded_model(shared_data: Path, tmp_path: Path) -> None:
    from benchmarks.runtime import ranks  # torchrec takes a while
    from tests.support.torchrec.auc import BATCH, auc, train_under_oper, train_unsharded

    log, profile, plan = (
        shared_data / "criteo_kaggle_80k" / "data.parquet",
        tmp_path / "profile",
        tmp_path / "plan",
    )
    # Values first seen in the held-out fifth have row 0, as vocabularies say.
    options = ("--columns", "I*,C*", "--missing", "-1", "--ids", "vocab", "--dim", 16)
    fine("profile", log, "-o", profile, "--rows", "0:80%", *options)
    # Linked ranks have replicas; ranks that share memory would have none.
    linked = replace(
        Topology.load(f"cpu:{RANKS}"), memory=(), latency=Latency.of_hops(0.0)
    ).to_dict()
    (tmp_path / "linked.yaml").write_text(yaml.safe_dump(linked), encoding="utf-8")
    fine(
        *("plan", profile, "-o", plan, "--topology", tmp_path / "linked.yaml"),
        *("--batch-size", BATCH),
    )
    assert Plan.load(plan).replica_accesses > 0

    (whole,) = ranks.run(train_unsharded, 1, log, plan)
    unsharded = auc(*whole)
    parts = ranks.run(train_under_oper, RANKS, log, plan)
    sharded = auc(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    print(f"AUC unsharded {unsharded:.6f}, under OPER on {RANKS} ranks {sharded:.6f}")
    assert unsharded > 0.7
    assert abs(sharded - unsharded) < 5e-5
