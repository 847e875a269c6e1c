"""Tables of a TorchRec model, found in a plan by name, and their optimizers.

A plan places tables; a model has collections of them, each of which gets its part of the plan
(oper/plan/plan_parts.py). Tables are matched by name. Their sizes and dtypes must be the plan's,
except that a plan for inference may have int8 for any table, whose rows are then quantised. The
optimizer is, like in TorchRec, the one that `apply_optimizer_in_backward` gave a table's parameter,
or else that of the sharder's fused parameters.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.plan.plan import Plan
from oper.plan.plan_parts import part_of
from oper.runtime.tables.optimizer_buckets import NO_OPTIMIZER, EmbeddingTable
from oper.runtime.tables.optimizers import Optimizer
from oper.tables.table import Table, tables_of
from oper.torchrec.model_warnings import ModelWarnings

_log = logging.getLogger(__name__)

# Settings of TorchRec's configs that OPER cannot follow.
_UNSUPPORTED = (
    "use_virtual_table",
    "virtual_table_eviction_policy",
    "total_num_buckets",
    "enable_embedding_update",
    "num_embeddings_post_pruning",
    "stash_weights",
)

# Modules that map ids to rows by the ids that this rank has seen so far. If the collection inside
# is sharded, each rank has its own mapping into rows that all of them share.
_MAP_IDS = (
    BaseManagedCollisionEmbeddingCollection,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
_OF_PROCESSED = "_embedding_bag_collection"  # also in modules that weigh features
_ATTRIBUTES = ("_embedding_module", _OF_PROCESSED, "_embedding_collection")


def collections(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the collections of a model that OPER's sharders take, by their path.

    Their type is matched exactly, like by TorchRec's DistributedModelParallel.
    """
    for path, inner in module.named_modules():
        if type(inner) in (EmbeddingBagCollection, EmbeddingCollection):
            yield path, inner


def check_place(module: nn.Module, path: str) -> None:
    """Raise OperError if the collection at a path of a model lies in a module that maps its ids."""
    parts = path.split(".")
    for depth in range(len(parts)):
        around = module.get_submodule(".".join(parts[:depth]))
        if isinstance(around, _MAP_IDS):
            raise _maps_ids(path, around)


def check_path(path: str) -> None:
    """Raise OperError if a path is one at which modules that map ids keep their collection.

    A sharder gets a collection and its path, but not the model around it. This check is for plans
    of TorchRec's own planner, with which no code of OPER has seen the model.
    """
    *around, name = path.split(".")
    if name not in _ATTRIBUTES:
        return
    may_be = "a module that maps ids to rows, which OPER does not support"
    if name == _OF_PROCESSED:
        may_be = f"a FeatureProcessedEmbeddingBagCollection, which OPER shards, or {may_be}"
    raise OperError(
        f"{path!r}: expected a plan of the whole model, got one of a collection at {name!r}, and "
        f"{'.'.join(around) or 'the model'!r} may be {may_be}: give DistributedModelParallel "
        "plan=oper.torchrec_plan(plan, model), which looks at the whole model"
    )


def _maps_ids(path: str, around: nn.Module) -> OperError:
    return OperError(
        f"{path!r} is in a {type(around).__name__}, which OPER does not support: it maps ids to "
        "rows on each rank by itself. Leave its tables out of the plan, and the module to a "
        "sharder of TorchRec's; or map ids before, by the rule that the log was profiled with"
    )


def configs(collection: Any) -> Sequence[Any]:
    """Return the configs of a collection's tables, in order."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def parameters(collection: Any) -> dict[str, nn.Parameter]:
    """Return the weight of each table by its name."""
    bags = isinstance(collection, EmbeddingBagCollection)
    tables = collection.embedding_bags if bags else collection.embeddings
    return {name: table.weight for name, table in tables.items()}


def paths_of_tables(found: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the path of each table's collection, by the table's name. A plan knows tables only by
    name: raise OperError if two collections have a table of the same name."""
    paths: dict[str, str] = {}
    for path, collection in found:
        for config in configs(collection):
            if config.name in paths:
                raise OperError(
                    f"table {config.name!r}: {paths[config.name]!r} and {path!r} both have one of "
                    "that name, by which a plan tells tables apart; give each its own"
                )
            paths[config.name] = path
    return paths


def check_tables(plan: Plan, collection: Any) -> None:
    """Raise OperError if a plan lacks a table of a collection or has it with another size or dtype,
    or if a config has an unsupported setting."""
    for config, mine in zip(configs(collection), tables_of(collection), strict=True):
        check_table(plan, config, mine)


def check_table(plan: Plan, config: Any, mine: Table) -> None:
    """Check one table with TorchRec's `config`, from which `tables_of` makes `mine`; raise the
    errors of `check_tables`."""
    planned = plan.tables[plan.table_index(config.name)]
    for name in _UNSUPPORTED:
        if getattr(config, name, None):
            raise OperError(
                f"table {config.name!r}: its config sets {name}, which OPER does not support; "
                "leave the table to a sharder of TorchRec's, or unset it"
            )
    serves_int8 = planned.dtype == "int8" and not plan.workload.training
    dtype = mine.dtype if serves_int8 else planned.dtype
    if (planned.rows, planned.dim, dtype) != (mine.rows, mine.dim, mine.dtype):
        why = ""
        if planned.dtype == "int8" and plan.workload.training:
            why = f" (int8 rows are not trained: plan with {option('--mode', 'inference')})"
        raise OperError(
            f"table {mine.name!r}: the plan has {planned.rows:,} rows of dim {planned.dim}, "
            f"{planned.dtype}, and the model {mine.rows:,} of dim {mine.dim}, {mine.dtype}; "
            f"plan for the tables of this model{why}"
        )


def check_places_of_tables(module: nn.Module, found: Iterable[tuple[str, Any]]) -> None:
    """Raise OperError if a model has a parameter of these collections' tables at two places, of
    which sharding would change only one: tied weights, or a collection with two paths."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for _, collection in found:
        for table, parameter in parameters(collection).items():
            if len(places := names[id(parameter)]) > 1:
                raise OperError(
                    f"table {table!r}: expected its weight at one place of the model, got it at "
                    f"{' and '.join(map(repr, places))}, which would come apart in sharding: use "
                    "the collection by one path, give features that share rows one table, or copy "
                    "the weight"
                )


def check_kernels(collection: Any) -> None:
    """Raise OperError if the module of a table has a setting that its config lacks."""
    bags = isinstance(collection, EmbeddingBagCollection)
    tables = collection.embedding_bags if bags else collection.embeddings
    for config in configs(collection):
        kernel = tables[config.name]
        wanted: dict[str, Any] = {
            "padding_idx": None,
            "max_norm": None,
            "scale_grad_by_freq": False,
        }
        if bags:
            wanted["mode"] = "mean" if config.pooling is PoolingType.MEAN else "sum"
        for setting, value in wanted.items():
            got = getattr(kernel, setting, value)
            if got != value:
                raise OperError(
                    f"table {config.name!r}: expected {setting}={value!r} of its "
                    f"{type(kernel).__name__}, as its config says, got {got!r}, which sharding "
                    "would lose: set the config's pooling, and leave padding out of the batch"
                )


def match_tables(
    plan: Plan,
    collection: Any,
    fused_params: Mapping[str, Any] | None,
    warnings: ModelWarnings,
) -> tuple[Plan, list[EmbeddingTable]]:
    """Return the part of a plan for a collection's engine, and its tables; raise the errors of
    `check_tables`. `warnings` are those of the model."""
    check_tables(plan, collection)
    check_kernels(collection)
    plan = part_of(plan, [plan.table_index(config.name) for config in configs(collection)])
    weights, tables = parameters(collection), []
    for config in configs(collection):
        index = plan.table_index(config.name)
        pooling = getattr(config, "pooling", None)
        optimizer = optimizer_of(weights[config.name], fused_params, warnings)
        tables.append(
            EmbeddingTable(
                index=index,
                features=tuple(config.feature_names),
                pooling="none" if pooling is None else pooling.name.lower(),
                optimizer=optimizer,
            )
        )
    if plan.workload.training:
        _warn_of_other_optimizers(plan, tables, warnings)
    return plan, tables


def optimizer_of(
    parameter: Any, fused_params: Mapping[str, Any] | None, warnings: ModelWarnings
) -> Optimizer:
    """Return a table's optimizer: none if its parameter is frozen, else the one put on it by
    `apply_optimizer_in_backward`, else that of the fused parameters (SGD if they name none)."""
    if not parameter.requires_grad:
        return NO_OPTIMIZER

    def warn(text: str) -> None:
        warnings.warn(_log, text, text)

    classes = getattr(parameter, "_optimizer_classes", [])
    if not classes:
        return Optimizer.of_fused(fused_params or {}, warn)
    if len(classes) > 1:
        raise OperError(
            f"{len(classes)} optimizers were put on one table "
            f"({', '.join(c.__name__ for c in classes)}), and at most one is supported"
        )
    return Optimizer.of_torch(classes[0], parameter._optimizer_kwargs[0], fused_params, warn)


def first_names(names: Collection[str], most: int = 4) -> str:
    """Return the first names in alphabetic order, for an error."""
    first = ", ".join(sorted(names)[:most]) or "none"
    return first + (", …" if len(names) > most else "")


def _warn_of_other_optimizers(
    plan: Plan, tables: Iterable[EmbeddingTable], warnings: ModelWarnings
) -> None:
    names: dict[tuple[str, str], list[str]] = {}
    for table in tables:
        planned, kind = plan.tables[table.index], table.optimizer.kind
        if kind not in ("none", planned.optimizer):
            names.setdefault((planned.optimizer, kind), []).append(planned.name)
    for (planned_for, kind), of in names.items():
        more = f" and at least {len(of) - 1} more" if len(of) > 1 else ""
        warnings.warn(
            _log,
            ("optimizer", planned_for, kind),
            f"table {of[0]!r}{more}: the plan was made for {planned_for}, and {kind} is what "
            "trains; the plan's balance of memory does not hold for it "
            "(apply_optimizer_in_backward and the sharder's fused_params say what trains)",
        )
