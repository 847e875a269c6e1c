"""Sharded collections of tables, which TorchRec's DistributedModelParallel puts into a model.

A batch goes through `input_dist` (ids become addresses and are sorted, which a pipeline does while
the batch before trains), `compute` (all tables in one lookup) and `output_dist`. The engine does
all the work (engine.py); parameters and state dicts have TorchRec's names. The parameters
themselves are empty: rows lie in the heaps of all ranks, at their places in the plan.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.model_tracker import model_delta_tracker
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin, LazyNoWait, NoWait
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt
from torchrec.streamable import Multistreamable

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.runtime import initial_values
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.tables.kernel_structs import as_features
from oper.tables.table import tables_of_collection
from oper.torchrec import module_tables, table_parameters
from oper.torchrec.fused_optimizer import BucketOptimizer
from oper.torchrec.state_dict import TableBlocks
from oper.torchrec.table_parameters import OptimizersOfTable, TableParameters
from oper.torchrec.uncopied import Uncopied


@dataclass
class BatchContext(Multistreamable):
    """Parts of a batch that `output_dist` needs in addition to its rows."""

    features: KeyedJaggedTensor | None = None
    batch: PreparedBatch | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the batch's tensors on devices until the present work of `stream` is done."""
        if self.features is not None and self.features.device().type != "cpu":
            self.features.record_stream(stream)
        if self.batch is not None:
            self.batch.record_stream(stream)


class _ShardedByRows(Uncopied, ShardedEmbeddingModule, FusedOptimizerModule):
    """Part that both collections share. `module` is the unsharded collection.

    A module on the meta device gets initial rows by its configs' `init_fn`, equal for any plan and
    number of ranks; a module with weights keeps those of rank 0.
    """

    _collection: str  # TorchRec's name of the tables in parameters' keys

    def __init__(self, module: nn.Module, engine: EmbeddingEngine, group: dist.ProcessGroup | None):
        super().__init__()
        self._engine, self._blocks = engine, TableBlocks(engine, group)
        self.saved_before: Any = None  # checkpoint that deltas continue (saved_before.py)
        self._configs = list(module_tables.configs(module))
        self.add_module(self._collection, nn.ModuleDict())
        weights = module_tables.parameters(module)
        self._weights = [self._add_parameter(config, weights) for config in self._configs]
        self._optimizer = CombinedOptimizer(
            [("", self._bucket_optimizer(b)) for b, x in enumerate(engine.buckets) if x.trained]
        )
        tables = getattr(self, self._collection)
        self._parameters_check = TableParameters(tables, engine.buckets, engine.training)
        engine.training_step.frozen_tables = self._parameters_check
        self._set_initial_rows(module)
        self._register_state_dict_hook(_save_tables)
        self.register_load_state_dict_pre_hook(_load_tables)

    @property
    def engine(self) -> EmbeddingEngine:
        """Engine of the collection, with its counters."""
        return self._engine

    @property
    def blocks(self) -> TableBlocks:
        """Tables in the form of state dicts."""
        return self._blocks

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Optimizers of the tables."""
        return self._optimizer

    def create_context(self) -> BatchContext:
        """Return the context of a batch."""
        return BatchContext()

    @torch.compiler.disable  # reading ids and rows cannot be compiled, unlike the layers around it
    def forward(self, features: Any) -> LazyAwaitable[Any]:
        """Take a batch from ids to rows, without the waits that pipelines put between its
        stages."""
        if torch.compiler.is_exporting():
            raise self._cannot_be_converted()
        ctx = self.create_context()
        ctx.features = maybe_td_to_kjt(features)
        return self.compute_and_output_dist(ctx, KJTList([self._engine.prepare(ctx.features)]))

    def input_dist(self, ctx: BatchContext, features: Any) -> Any:
        """Translate and sort a batch, without communication."""
        ctx.features = maybe_td_to_kjt(features)
        batch = self._engine.prepare(ctx.features)
        return KJTListSplitsAwaitable([NoWait(NoWait(batch))], ctx)

    def compute(self, ctx: BatchContext, dist_input: KJTList) -> torch.Tensor:
        """Look up the rows of a batch, [samples, columns], or flat if they are not pooled."""
        if self.training and torch.is_grad_enabled() and not self._engine.training:
            raise OperError(
                "the plan was made for inference, and the model is in training mode; call "
                "model.eval() or torch.no_grad(), or make a plan with "
                f"{option('--mode', 'training')}"
            )
        ctx.batch = dist_input[0]
        return self._engine.lookup(ctx.batch)

    def reset_parameters(self) -> None:
        """Give all rows the initial values of their configs' `init_fn`. Call it on all ranks."""
        fills = [config.init_fn for config in self._configs]
        self._blocks.replaced(range(len(fills)))
        initial_values.fill_tables(self._engine, fills)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's quantisation gives every module its qconfig, and then swaps modules of the
        # requested types: these would silently stay unquantised.
        if name == "qconfig":
            raise self._cannot_be_converted()
        if name == self._collection:
            raise OperError(
                f"{self._called}: {name}: expected the modules that sharding made, got others, "
                "which change no row: to set rows, give load_state_dict whole tables"
            )
        super().__setattr__(name, value)

    # TorchRec keeps the kernels of a sharded module in `_lookups`. There are none here, and
    # EmbeddingQuantizationUtils, which would quantise them, must not ignore that. Only the
    # quantisation of a FeatureProcessedEmbeddingBagCollection reads `is_weighted` of a sharded
    # module. torch.jit reads both, because it reads all attributes.

    def is_weighted(self) -> bool:
        raise self._cannot_be_converted()

    @property
    def _lookups(self) -> list[nn.Module]:
        raise self._cannot_be_converted()

    @_lookups.setter
    def _lookups(self, kernels: list[nn.Module]) -> None:
        assert not kernels

    def train(self, mode: bool = True) -> "_ShardedByRows":
        """Set the training mode."""
        nn.Module.train(self, mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        place = self._engine.device.torch_device
        table_parameters.check_moves(self._called, fn, place)
        moved = super()._apply(fn, recurse)
        self._parameters_check.accept_moves()
        return moved

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Do nothing: rows are read in place."""

    @property
    def _called(self) -> str:
        names = ", ".join(config.name for config in self._configs)
        return f"{type(self).__name__} of tables {names}"

    def _cannot_be_converted(self) -> OperError:
        return OperError(
            f"{self._called}: cannot be quantised, scripted, traced or exported, because its rows "
            "lie in memory that all ranks share; save a checkpoint, load it into the unsharded "
            "model and convert that, or load it into a model that is sharded by a plan for "
            "inference whose tables are int8. Convert dense layers by giving the submodule that "
            "has them"
        )

    def _cannot_be(self, done: str) -> OperError:
        return OperError(
            f"{type(self).__name__}: its rows lie in memory that all ranks share, and cannot be "
            f"{done}; save a checkpoint of its state_dict(), and load it into a second model"
        )

    @property
    def _table_name_to_config(self) -> Mapping[str, Any]:
        # ModelDeltaTrackerTrec reads this first of a collection that it tracks.
        raise OperError(
            f"{self._called}: expected no ModelDeltaTrackerTrec, got one, which finds no kernels "
            "to track here: save changed rows with oper.save(…, deltas=True) and oper.save_delta, "
            "or count the rows that are read with oper.record or oper.monitor"
        )

    def _add_parameter(self, config: Any, given: Mapping[str, nn.Parameter]) -> nn.Parameter:
        # It has the table's width, because optimizers take means over rows.
        place = self._engine.device.torch_device
        # DistributedDataParallel refuses models that train nothing, and serving trains nothing.
        trains = given[config.name].requires_grad or not self._engine.training
        rows = torch.empty(0, config.embedding_dim, device=place)
        parameter = table_parameters.TableParameter(rows, trains)
        holder = table_parameters.TableHolder(config.name, parameter)
        getattr(self, self._collection)[config.name] = holder
        return parameter

    def extra_repr(self) -> str:
        """Return the tables with their sizes, and the plan, because parameters are empty."""
        engine, tables = self._engine, tables_of_collection(self)
        lines = [f"{table.name}: {table.rows:,} x {table.dim} {table.dtype}" for table in tables]
        plan = f"{engine.plan!r}".strip("<>")
        return "\n".join([*lines, f"rank {engine.rank} of {engine.ranks}, {plan}"])

    def _key(self, table: int) -> str:
        return f"{self._collection}.{self._configs[table].name}.weight"

    def _bucket_optimizer(self, bucket: int) -> BucketOptimizer:
        tables = self._engine.buckets[bucket].tables
        return BucketOptimizer(
            self._engine,
            self._blocks,
            bucket,
            {self._key(t): self._weights[t] for t in tables},
            {self._key(t): t for t in tables},
        )

    def _mark_parameters(self) -> None:
        """Tell the user's dense optimizer that these parameters have their own optimizers."""
        # A parameter and its optimizer reference each other. They must not reference the engine, so
        # that the rows are freed with the module, not at a garbage collection.
        engine: Any = weakref.proxy(self._engine)
        blocks: Any = weakref.proxy(self._blocks)
        for bucket, content in enumerate(self._engine.buckets):
            for table in content.tables:
                weight: Any = self._weights[table]
                weight._in_backward_optimizers = OptimizersOfTable(
                    self._configs[table].name,
                    BucketOptimizer(engine, blocks, bucket, {"": weight}, {"": table})
                    if content.trained
                    else EmptyFusedOptimizer(),
                )

    def _set_initial_rows(self, module: nn.Module) -> None:
        self._mark_parameters()
        weights = module_tables.parameters(module)
        if all(weight.is_meta for weight in weights.values()):
            self.reset_parameters()
        else:
            values = [weights[config.name].detach() for config in self._configs]
            initial_values.copy_tables(self._engine, values)


class _Pooled(LazyGetItemMixin[str, torch.Tensor], LazyNoWait[KeyedTensor]):
    """KeyedTensor for TorchRec's modules, which expect one to wait for."""


class OperShardedEmbeddingBagCollection(_ShardedByRows):
    """EmbeddingBagCollection whose rows are at their places in a plan."""

    _collection = "embedding_bags"

    def __init__(self, module: EmbeddingBagCollection, engine: EmbeddingEngine, group: Any) -> None:
        super().__init__(module, engine, group)
        self._names = [n for names in get_embedding_names_by_table(self._configs) for n in names]
        self._dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]

    def embedding_bag_configs(self) -> list[Any]:
        """Return the tables' configs, equal to the unsharded collection's."""
        return self._configs

    def output_dist(self, ctx: BatchContext, output: torch.Tensor) -> LazyAwaitable:
        """Return the rows as a KeyedTensor."""
        return _Pooled(KeyedTensor(self._names, self._dims, output, key_dim=1))

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Class of the unsharded collection."""
        return EmbeddingBagCollection


class OperShardedEmbeddingCollection(_ShardedByRows):
    """EmbeddingCollection whose rows are at their places in a plan."""

    _collection = "embeddings"

    def __init__(self, module: EmbeddingCollection, engine: EmbeddingEngine, group: Any) -> None:
        super().__init__(module, engine, group)
        self._dim, self._need_indices = module.embedding_dim(), module.need_indices()
        names = get_embedding_names_by_table(self._configs)
        self._names = [
            (feature, name)
            for config, of_table in zip(self._configs, names, strict=True)
            for feature, name in zip(config.feature_names, of_table, strict=True)
        ]

    def embedding_configs(self) -> list[Any]:
        """Return the tables' configs, equal to the unsharded collection's."""
        return self._configs

    def output_dist(self, ctx: BatchContext, output: torch.Tensor) -> LazyAwaitable:
        """Return the rows as a JaggedTensor for each lookup."""
        assert ctx.features is not None
        assert ctx.batch is not None
        # A feature of several tables occurs in a batch once per table, in the tables' order.
        counts = as_features(ctx.batch.own_features)["bags"].tolist()  # one access each
        parts = output.view(-1, self._dim).split(counts)
        by_key: dict[str, list[torch.Tensor]] = {}
        for key, part in zip(ctx.batch.keys, parts, strict=True):
            by_key.setdefault(key, []).append(part)
        features = ctx.features
        keys = features.keys()
        lengths = dict(
            zip(keys, features.lengths().view(len(keys), features.stride()), strict=True)
        )
        indices: dict[str, torch.Tensor] = {}
        if self._need_indices:  # on a device this waits for the offsets of the features
            values = features.values().split(features.length_per_key())
            indices = dict(zip(keys, values, strict=True))
        result = {
            name: JaggedTensor(
                values=by_key[feature].pop(0),
                lengths=lengths[feature],
                weights=indices.get(feature),
            )
            for feature, name in self._names
        }
        return LazyNoWait(result)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Class of the unsharded collection."""
        return EmbeddingCollection


# By default the tracker silently skips unknown collections.
model_delta_tracker.SUPPORTED_MODULES += (_ShardedByRows,)


def _save_tables(
    module: _ShardedByRows, destination: dict[str, Any], prefix: str, _: Mapping[str, Any]
) -> None:
    """Put the tables into a state dict."""
    tables = range(len(module._configs))
    for table, value in zip(tables, module._blocks.read(tables), strict=True):
        destination[prefix + module._key(table)] = value


def _load_tables(module: _ShardedByRows, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the tables out of a state dict during its load."""
    keys = {table: prefix + module._key(table) for table in range(len(module._configs))}
    values = {table: state_dict[key] for table, key in keys.items() if key in state_dict}
    module._blocks.agree_on(values)
    for table in values:
        state_dict[keys[table]] = module._weights[table]
    module._parameters_check.accept_writes()
    module._blocks.write(values)
