"""Settings of optimizers that differ between ranks, by which copies of rows would come apart."""

import pytest

from tests.support.torchrec import equal_settings_cases as cases

PLACES = [
    {},
    {"copies": 1.0},
    {"copies": 0.0},
    {"nodes": (0, 1)},
    {"nodes": (0, 1), "fetch": "distinct"},
    {"nodes": (0, 1), "fetch": "pooled"},
    {"nodes": (0, 1), "fetch": "pooled", "copies": 0.0},
]


@pytest.mark.parametrize("options", PLACES)
def test_learning_rates_that_differ_are_named_on_all_ranks(worlds, options):
    worlds.run(2, cases.unlike_rates, "sgd", **options)


def test_learning_rates_of_three_ranks_on_two_nodes(worlds):
    worlds.run(3, cases.unlike_rates, "rowwise_adagrad", nodes=(0, 1, 1))


@pytest.mark.parametrize("options", PLACES)
def test_learning_rates_that_all_ranks_change_alike(worlds, options):
    worlds.run(2, cases.changing_rates, **options)


def test_numbers_of_steps_that_differ_are_named(worlds):
    worlds.run(2, cases.unlike_steps)


def test_settings_that_differ_when_the_model_is_sharded_are_named(worlds):
    worlds.run(2, cases.unlike_from_the_start)
