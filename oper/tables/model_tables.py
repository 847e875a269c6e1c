"""The tables of a TorchRec model or of its configurations."""

from collections.abc import Iterator, Sequence
from typing import Any

from oper.base.errors import OperError
from oper.tables.table import Table

_TORCHREC_DTYPES = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8"}
_CONFIG = ("name", "num_embeddings", "embedding_dim", "feature_names", "data_type")
_TORCH_OPTIMIZERS = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RowWiseAdagrad": "rowwise_adagrad",
    "Adam": "adam",
    "PartialRowWiseAdam": "partial_rowwise_adam",
}


def tables_of(module: Any, *, optimizer: str = "rowwise_adagrad") -> tuple[Table, ...]:
    """The tables of every TorchRec embedding (bag) collection in a `torch.nn.Module`.

    Sizes, dtype, pooling and features are taken from the configs; the optimizer is the one that
    `apply_optimizer_in_backward` gave the table, else `optimizer`. Ids are dense. OperError where
    the module has no collection, or a table has a dtype or optimizer that is not supported.
    """
    tables: list[Table] = []
    for _, inner in collections_of(module):
        tables += tables_of_collection(inner, optimizer=optimizer)
    if not tables:
        raise OperError(
            f"{type(module).__name__}: has no TorchRec EmbeddingBagCollection or "
            "EmbeddingCollection; pass a module that has one"
        )
    repeated = {t.name for t in tables if sum(u.name == t.name for u in tables) > 1}
    if repeated:
        raise OperError(
            f"{type(module).__name__}: several collections have a table {min(repeated)!r}; "
            "give each table a name of its own"
        )
    return tuple(tables)


def tables_of_list(given: Any) -> tuple[Table, ...]:
    """The tables of a list of `Table`s or of TorchRec's configs, as `tables_of` has the tables of
    a collection of those. OperError where it is neither."""
    needed = (
        "and a list of oper.Table, or of TorchRec's EmbeddingBagConfig or EmbeddingConfig, was "
        "needed; or a model, a profile, a file of tables, or None"
    )
    if not isinstance(given, Sequence):
        raise OperError(f"tables is a {type(given).__name__}, {needed}")
    tables = []
    for number, item in enumerate(given):
        if isinstance(item, Table):
            tables.append(item)
        elif all(hasattr(item, name) for name in _CONFIG):
            tables.append(_table_of(item, "rowwise_adagrad"))
        else:
            raise OperError(f"tables[{number}] is a {type(item).__name__}, {needed}")
    return tuple(tables)


def collections_of(module: Any) -> Iterator[tuple[str, Any]]:
    """The embedding (bag) collections of a module by their path, unsharded ones and those that
    TorchRec or OPER sharded."""
    within: list[str] = []  # parts of a collection are none of their own
    for path, inner in module.named_modules():
        if configs_of(inner) is not None and not any(path.startswith(f"{p}.") for p in within):
            within.append(path)
            yield path, inner


def tables_of_collection(
    collection: Any, *, optimizer: str = "rowwise_adagrad"
) -> tuple[Table, ...]:
    """The tables of one of them, as `tables_of`; of a sharded one all optimizers are `optimizer`,
    as its parameters no longer tell them."""
    weights = getattr(collection, "embedding_bags", None) or getattr(collection, "embeddings", {})
    tables = []
    for config in configs_of(collection) or ():
        parameter = weights[config.name].weight if config.name in weights else None
        tables.append(_table_of(config, _optimizer_of(parameter, optimizer)))
    return tuple(tables)


def configs_of(collection: Any) -> Sequence[Any] | None:
    """The configs of a collection's tables, unsharded or not; None of another module."""
    for name in ("embedding_bag_configs", "embedding_configs"):
        # TorchRec's sharded ones have them as an attribute.
        found: Any = getattr(collection, name, None) or getattr(collection, f"_{name}", None)
        if found is not None:
            return list(found() if callable(found) else found)
    return None


def _table_of(config: Any, optimizer: str) -> Table:
    dtype = _TORCHREC_DTYPES.get(config.data_type.name)
    if dtype is None:
        raise OperError(
            f"table {config.name!r}: dtype {config.data_type.name}, and one of "
            f"{', '.join(_TORCHREC_DTYPES)} was needed"
        )
    pooling = getattr(config, "pooling", None)
    return Table(
        name=config.name,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        dtype=dtype,
        optimizer=optimizer,
        pooling="none" if pooling is None else pooling.name.lower(),
        features=tuple(config.feature_names),
    )


def _optimizer_of(parameter: Any, default: str) -> str:
    """The fused optimizer that was put on an unsharded parameter, if any."""
    classes = getattr(parameter, "_optimizer_classes", None)
    if not classes:
        return default
    name = classes[0].__name__
    settings = (getattr(parameter, "_optimizer_kwargs", None) or [{}])[0]
    if name == "SGD" and settings.get("momentum", 0):
        return "momentum_sgd"
    if name not in _TORCH_OPTIMIZERS:
        raise OperError(
            f"optimizer {name} of a table: the size of its state is unknown; known are "
            f"{', '.join(_TORCH_OPTIMIZERS)}"
        )
    return _TORCH_OPTIMIZERS[name]
