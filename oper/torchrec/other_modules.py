"""Modules of a model with rows that OPER's sharders do not take, with their kinds and remedies.

DistributedModelParallel looks for a sharder by a module's exact type, so it skips subclasses of
collections, collections with their optimizer inside, quantised collections and torch's own
embeddings. Their rows silently stay on every rank. If a plan has their tables, this module raises
an error that names them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantSequences

from oper.base.errors import OperError
from oper.tables.table import collections_of, configs_of
from oper.torchrec.module_tables import collections


class Kind(StrEnum):
    """Reason for which OPER's sharders do not take a module."""

    SHARDED_BY_OPER = "sharded by OPER"
    SHARDED = "sharded"
    QUANTISED = "quantised"
    FUSED = "fused"
    SUBCLASS = "subclass"
    OTHER_COLLECTION = "other collection"
    TORCH = "torch"


_TO_DO = {
    Kind.SHARDED_BY_OPER: "use the model as it is, or shard a new one",
    Kind.SHARDED: "give the unsharded model, or leave these tables out of the plan",
    Kind.QUANTISED: (
        "shard the model before it was quantised, by a plan for inference with int8 tables (dtype "
        "int8 of a table, mode='inference')"
    ),
    Kind.FUSED: (
        "use EmbeddingBagCollection or EmbeddingCollection, and put the optimizer on their tables "
        "by apply_optimizer_in_backward or by the sharder's fused_params"
    ),
    Kind.SUBCLASS: (
        "sharders go by exact type: use EmbeddingBagCollection or EmbeddingCollection themselves, "
        "inside of a module that does what the subclass adds"
    ),
    Kind.OTHER_COLLECTION: (
        "use EmbeddingBagCollection or EmbeddingCollection, or leave its tables out of the plan "
        "and the module to a sharder of its own"
    ),
    Kind.TORCH: (
        "every rank has a copy of it: for rows by a plan make it a table of an "
        "EmbeddingBagCollection or EmbeddingCollection, with an EmbeddingBagConfig or "
        "EmbeddingConfig of the plan's name for it, and read it by a KeyedJaggedTensor"
    ),
}


@dataclass(frozen=True)
class OtherModule:
    """Module with rows that OPER's sharders do not take."""

    path: str
    called: str  # its class, by its usual name
    kind: Kind
    tables: frozenset[str]  # the names of its tables; for torch's modules, its own name

    @property
    def to_do(self) -> str:
        """Remedy, for an error or a finding."""
        return _TO_DO[self.kind]

    @property
    def a_class(self) -> str:
        """Its class with an article: `a FusedEmbeddingBagCollection`."""
        return f"{'an' if self.called[0] in 'AEIOU' else 'a'} {self.called}"

    @property
    def named(self) -> str:
        """Name and class, for a sentence: `'bags', a FusedEmbeddingBagCollection`."""
        return f"{repr(self.path) if self.path else 'the model itself'}, {self.a_class}"


def other_modules(model: nn.Module) -> list[OtherModule]:
    """Return all such modules of a model, in its order, except modules around a collection that is
    taken, and modules inside of a collection."""
    taken = [path for path, _ in collections(model)]
    # A module of torch has only the name of its attribute, which rarely identifies a table.
    in_collections = {
        config.name for _, module in collections(model) for config in configs_of(module) or ()
    }
    others = []
    within = [path for path, _ in collections_of(model)]
    for path, module in collections_of(model):
        if path in taken or any(inner.startswith(f"{path}.") for inner in taken if path):
            continue
        if not path and taken:
            continue
        names = frozenset(config.name for config in configs_of(module) or ())
        others.append(OtherModule(path, _called(module), _kind(module), names))
    for path, module in model.named_modules():
        inside = any(outer == "" or path.startswith(f"{outer}.") for outer in within)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and not inside:
            names = frozenset({path.rpartition(".")[2]} - {""} - in_collections)
            called = _called(module)
            if type(module) in (nn.Embedding, nn.EmbeddingBag):
                called = f"torch.nn.{called}"
            others.append(OtherModule(path, called, Kind.TORCH, names))
    return others


def check_others(model: nn.Module, planned: Collection[str]) -> None:
    """Raise OperError if a module that no sharder takes has one of the plan's tables, `planned`. A
    module that is sharded already is allowed: several plans may share a model."""
    for text in left_out(model, planned, "plan"):
        raise OperError(text)


def check_fused(model: nn.Module) -> None:
    """Raise OperError if a collection has its optimizer inside. OPER's sharders do not take its
    tables, and DistributedModelParallel fails on its optimizer with an AttributeError."""
    for other in other_modules(model):
        if other.kind == Kind.FUSED:
            raise OperError(
                f"{other.named}: DistributedModelParallel takes none without a sharder for it, and "
                f"OPER has none; {other.to_do}"
            )


def left_out(model: nn.Module, tables: Collection[str], source: str) -> Iterator[str]:
    """Yield the fault of each module that no sharder takes and that has one of `tables`, which are
    those of the `source`, a plan or a profile."""
    for other in other_modules(model):
        named = sorted(other.tables.intersection(tables))
        if named and other.kind not in (Kind.SHARDED, Kind.SHARDED_BY_OPER):
            yield (
                f"table {named[0]!r} of the {source} is in {other.named}, which no sharder of "
                f"OPER's takes; {other.to_do}"
            )


def instead(model: nn.Module) -> str:
    """Return, for an error, the modules that a model without collections has in their place, with
    the remedy."""
    others = other_modules(model)
    if not others:
        return "; give the model that has them"
    first = others[0]
    if first.kind in (Kind.SHARDED, Kind.SHARDED_BY_OPER):
        by = "TorchRec" if first.kind == Kind.SHARDED else "OPER"
        return f"; {first.path!r} is already sharded, by {by}: {first.to_do}"
    more = f" (and {len(others) - 1} more such modules)" if len(others) > 1 else ""
    has = f"it has {first.named}{more}" if first.path else f"it is {first.a_class} itself"
    return f"; {has}: {first.to_do}"


def _kind(module: nn.Module) -> Kind:
    if isinstance(module, ShardedModule):
        ours = type(module).__module__.startswith("oper.")
        return Kind.SHARDED_BY_OPER if ours else Kind.SHARDED
    if isinstance(module, QuantBags | QuantSequences):
        return Kind.QUANTISED
    if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection):
        return Kind.FUSED
    if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        return Kind.SUBCLASS
    return Kind.OTHER_COLLECTION


def _called(module: nn.Module) -> str:
    """Return the class of a module by its usual name: quantised collections have the plain ones'
    names."""
    name = type(module).__name__
    return f"Quant{name}" if type(module) in (QuantBags, QuantSequences) else name
