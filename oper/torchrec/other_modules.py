"""Modules of a model with rows that no sharder of OPER's takes: what each is, and what to do.

DistributedModelParallel looks for a sharder by a module's exact type, so that a subclass of a
collection, one with its optimizer inside, a quantised one and torch's own embeddings all pass every
sharder by. Their rows stay on every rank, without a word of TorchRec's: what a plan has of them is
refused by name here.
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
    """Why no sharder of OPER's takes a module."""

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
    """A module with rows that no sharder of OPER's takes."""

    path: str
    called: str  # its class, as it is known
    kind: Kind
    tables: frozenset[str]  # the names of its tables; of torch's modules its own

    @property
    def to_do(self) -> str:
        """What to do, for an error or a finding."""
        return _TO_DO[self.kind]

    @property
    def a_class(self) -> str:
        """Its class with an article: `a FusedEmbeddingBagCollection`."""
        return f"{'an' if self.called[0] in 'AEIOU' else 'a'} {self.called}"

    @property
    def named(self) -> str:
        """The module, for a sentence: `'bags', a FusedEmbeddingBagCollection`."""
        return f"{repr(self.path) if self.path else 'the model itself'}, {self.a_class}"


def other_modules(model: nn.Module) -> list[OtherModule]:
    """All of a model, in its order. Modules around a collection that is taken are not among them,
    nor is what lies inside of a collection."""
    taken = [path for path, _ in collections(model)]
    # A module of torch's has no name but that of its attribute, which says little beside a table.
    in_collections = {
        config.name for _, module in collections(model) for config in configs_of(module) or ()
    }
    found = []
    within = [path for path, _ in collections_of(model)]
    for path, module in collections_of(model):
        if path in taken or any(inner.startswith(f"{path}.") for inner in taken if path):
            continue
        if not path and taken:
            continue
        names = frozenset(config.name for config in configs_of(module) or ())
        found.append(OtherModule(path, _called(module), _kind(module), names))
    for path, module in model.named_modules():
        inside = any(outer == "" or path.startswith(f"{outer}.") for outer in within)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and not inside:
            names = frozenset({path.rpartition(".")[2]} - {""} - in_collections)
            called = _called(module)
            if type(module) in (nn.Embedding, nn.EmbeddingBag):
                called = f"torch.nn.{called}"
            found.append(OtherModule(path, called, Kind.TORCH, names))
    return found


def check_others(model: nn.Module, planned: Collection[str]) -> None:
    """OperError if a module that no sharder takes has a table of the plan, whose tables are
    `planned`. One that is sharded already is no mistake by itself: several plans may share a
    model."""
    for text in left_out(model, planned, "plan"):
        raise OperError(text)


def check_fused(model: nn.Module) -> None:
    """OperError if a collection has its optimizer inside, whose tables no sharder of OPER's
    takes: DistributedModelParallel fails on its optimizer, with an AttributeError."""
    for other in other_modules(model):
        if other.kind == Kind.FUSED:
            raise OperError(
                f"{other.named}: DistributedModelParallel takes none without a sharder for it, and "
                f"OPER has none; {other.to_do}"
            )


def left_out(model: nn.Module, tables: Collection[str], source: str) -> Iterator[str]:
    """What is wrong with each module that no sharder takes and that has one of `tables`, which are
    those of a plan or a profile, as `source` says."""
    for other in other_modules(model):
        named = sorted(other.tables.intersection(tables))
        if named and other.kind not in (Kind.SHARDED, Kind.SHARDED_BY_OPER):
            yield (
                f"table {named[0]!r} of the {source} is in {other.named}, which no sharder of "
                f"OPER's takes; {other.to_do}"
            )


def instead(model: nn.Module) -> str:
    """What a model without collections has in their place and what to do with it, for an error."""
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
    """The class of a module, as it is known: quantised collections have the plain ones' names."""
    name = type(module).__name__
    return f"Quant{name}" if type(module) in (QuantBags, QuantSequences) else name
