"""`oper.record` counts in a live model what `oper.profile` counts of its batches."""

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import oper
from oper.base.errors import OperError
from oper.profiling.profile import Profile
from tests.support.runtime.worlds import Worlds
from tests.support.torchrec import recording_cases as cases
from tests.support.torchrec.models import SAMPLES, Model, batch


@pytest.fixture(scope="module")
def worlds():
    with Worlds() as started:
        yield started


def assert_equal(found: Profile, expected: Profile) -> None:
    """Two profiles have equal counts for each table, in whatever order the tables are."""
    assert found.samples == expected.samples
    assert found.bag_lengths is not None
    assert expected.bag_lengths is not None
    names = [table.name for table in expected.tables]
    for number, table in enumerate(found.tables):
        other = names.index(table.name)
        assert table.rows == expected.tables[other].rows
        np.testing.assert_array_equal(found.table_accesses(number), expected.table_accesses(other))
        np.testing.assert_array_equal(
            found.table_samples_with_row(number), expected.table_samples_with_row(other)
        )
        assert found.bag_lengths.summary(number) == expected.bag_lengths.summary(other)
    assert len(found.tables) == len(names)


@pytest.mark.parametrize("pipeline", [None, "TrainPipelineBase", "TrainPipelineSparseDist"])
@pytest.mark.parametrize("how", ["unsharded", "oper", "row_wise", "table_wise"])
def test_a_live_model_is_counted_as_its_batches(worlds, how, pipeline):
    if how == "unsharded" and pipeline == "TrainPipelineSparseDist":
        pytest.skip("that pipeline is for sharded models")
    for rank, found in enumerate(worlds.run(2, cases.recorded, how, pipeline)):
        batches = [batch(10 * rank + step) for step in range(cases.STEPS)]
        assert_equal(found, oper.profile(batches, Model("meta")))


def test_plans_are_made_from_it(tmp_path):
    model = Model("cpu")
    with oper.record(model) as recorder:
        model(batch(1))
    recorder.profile().save(tmp_path / "profile")
    profile = Profile.load(tmp_path / "profile", check=True)
    topology, workload = oper.Topology.load("cpu:2"), oper.Workload("training", "raw", SAMPLES)
    oper.make_plan(profile, topology, workload, oper.PlanSettings()).save(tmp_path / "plan")
    assert oper.Plan.load(tmp_path / "plan").ranks == 2


@pytest.mark.parametrize("first", [0, 1])
def test_several_recorders_may_end_in_any_order(worlds, first):
    for rank, found in enumerate(worlds.run(2, cases.recorded_twice, first)):
        batches = [batch(10 * rank + step) for step in range(cases.STEPS)]
        one, other = found
        assert_equal(one, oper.profile(batches[:2], Model("meta")))
        assert_equal(other, oper.profile(batches, Model("meta")))


class Twice(nn.Module):
    """Reads one collection twice for each sample, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.one = (
            EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name=name, num_embeddings=4, embedding_dim=4, feature_names=["f"]
                    )
                ]
            )
            for name in ("both", "one")
        )

    def forward(self, left: KeyedJaggedTensor, right: KeyedJaggedTensor) -> torch.Tensor:
        return self.both(left).values() + self.both(right).values() + self.one(left).values()


def kjt(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids)).int())


def test_collections_that_are_read_more_often_than_others():
    model = Twice()
    with oper.record(model) as recorder:
        model(kjt([0, 1]), kjt([1, 3]))
    with pytest.raises(OperError, match=r"\(both: 4, one: 2\).*profile\(samples=…\)"):
        recorder.profile()
    found = recorder.profile(samples=2)
    assert found.samples == 2
    assert found.accesses.tolist() == [1, 2, 0, 1, 1, 1, 0, 0]


def test_what_cannot_be_recorded():
    with (
        pytest.raises(OperError, match="has no TorchRec EmbeddingBagCollection"),
        oper.record(nn.Linear(1, 1)),
    ):
        pass
    model = Twice()
    with oper.record(model) as recorder:
        pass
    with pytest.raises(OperError, match="counted nothing: run the model"):
        recorder.profile()
    with (
        oper.record(model),
        pytest.raises(
            OperError, match=r"collection both.*in feature 'f', as table 'both' has 4 rows, got 4"
        ),
    ):
        model(kjt([0, 4]), kjt([1, 3]))


# Batches that hold KeyedJaggedTensors in some way.


def test_batches_of_any_structure():
    inputs = [batch(step) for step in range(3)]
    model = Model("meta")
    expected = oper.profile(inputs, model)
    for structure in (
        [(each.ids, each.weighted_ids) for each in inputs],
        [
            {"dense": torch.ones(2), "sparse": [each.ids, {"w": each.weighted_ids}]}
            for each in inputs
        ],
        [[None, each, each.ids] for each in inputs],  # one of them twice
        iter([(each.weighted_ids, each.ids, "label") for each in inputs]),
    ):
        assert_equal(oper.profile(structure, model), expected)


def test_batches_that_cannot_be_counted():
    table = oper.Table("f", 9, 4)
    with pytest.raises(OperError, match=r"batch 0: expected a KeyedJaggedTensor, .*got tuple"):
        oper.profile([(torch.ones(3), "x")], [table])
    with pytest.raises(OperError, match="batch 1: holds feature 'f' twice"):
        oper.profile([kjt([1]), (kjt([1]), kjt([2]))], [table])
    other = KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=torch.ones(1).int())
    with pytest.raises(OperError, match=r"batch 0: .* different numbers of samples \(1, 2\)"):
        oper.profile([(kjt([1, 2]), other)], [table])
