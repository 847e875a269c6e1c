"""Tables: their rows, width, optimizer, and the columns of a log that index them.

A row of table t takes S bytes in a message and m bytes in storage, which in training include its
optimizer state. Rows of all tables are numbered consecutively: GLOBAL ROW ID = offsets(tables)[t] +
row.

Tables come from a TorchRec model or its configs (below), from a YAML or JSON file or a published
data set (table_file.py), or from a log itself (oper/logs/table_discovery.py).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.defaults import DIM, DTYPE, OPTIMIZER
from oper.base.errors import OperError
from oper.base.units import whole_number

IdKind = Literal["dense", "hash", "vocab"]

_BYTES_PER_VALUE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
# FBGEMM's row-wise 8-bit tables store an fp32 scale and bias with each row.
_INT8_EXTRA_BYTES = native.shared("int8 extra bytes", 8)
# State per row in fp32: values for each of the row's elements, and values for the row as a whole.
_OPTIMIZER_STATE = {
    "none": (0, 0),
    "sgd": (0, 0),
    "momentum_sgd": (1, 0),
    "adagrad": (1, 0),
    "rowwise_adagrad": (0, 1),
    "adam": (2, 0),
    "partial_rowwise_adam": (1, 1),
}
_STATE_BYTES = 4
_MOST_ROWS = 2**40  # An address has 40 bits for the slot (oper/plan/layout.py).
_MOST_DIM = 2**20  # hundreds of times the widest rows that models have
# The names of TorchRec for dtypes, and of the classes of its optimizers.
_TORCHREC_DTYPES = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8"}
_CONFIG = ("name", "num_embeddings", "embedding_dim", "feature_names", "data_type")
_TORCH_OPTIMIZERS = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RowWiseAdagrad": "rowwise_adagrad",
    "Adam": "adam",
    "PartialRowWiseAdam": "partial_rowwise_adam",
}
CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": tuple(_BYTES_PER_VALUE),
    "optimizer": tuple(_OPTIMIZER_STATE),
    "pooling": ("sum", "mean", "none"),
    "ids": ("dense", "hash", "vocab"),
}


@dataclass(frozen=True)
class VocabularyDigest:
    """The identity of a vocabulary: its number of values, and the hex SHA-256 of these in the order
    of their rows (oper/logs/vocabulary.py)."""

    values: int
    sha256: str

    def __post_init__(self) -> None:
        if type(self.values) is not int or self.values < 0 or type(self.sha256) is not str:
            raise OperError(
                f"vocabulary: expected a number of values and a SHA-256, got {self.values!r:.80} "
                f"and {self.sha256!r:.80}; write the profile or plan again"
            )


@dataclass(frozen=True)
class IdRule:
    """The rule by which raw values of a log become rows.

    dense: the value is the row. hash: the value, or a stated hash of a text, modulo the table's
    rows. vocab: the rank of the value by descending count among those counted at least
    `min_count` times; all other values are row 0. `missing` is a value that means "no id"; nulls
    and empty fields always do. `vocabulary` identifies the vocabulary of a table that was counted;
    None before, and in profiles and plans of earlier versions.
    """

    kind: IdKind = "dense"
    min_count: int = 1
    missing: str | None = None
    vocabulary: VocabularyDigest | None = None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "IdRule":
        """Read the rule from JSON, the inverse of `to_dict`."""
        vocabulary = content.get("vocabulary")
        return cls(**{**content, "vocabulary": vocabulary and VocabularyDigest(**vocabulary)})

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as JSON holds it, with a vocabulary only if there is one."""
        content = asdict(self)
        return content if self.vocabulary else {k: content[k] for k in content if k != "vocabulary"}


@dataclass(frozen=True)
class Table:
    """One embedding table.

    `rows` is 0 until it is taken from a log (dense: the largest id + 1; vocab: the size of the
    vocabulary). `features` are the log's columns that index the table; an empty tuple means the
    column of the table's own name.
    """

    name: str
    rows: int
    dim: int = DIM
    dtype: str = DTYPE
    optimizer: str = OPTIMIZER
    pooling: str = "sum"
    features: tuple[str, ...] = ()
    ids: IdRule = IdRule()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise OperError(f"expected a text as the name of a table, got {self.name!r}")
        for field in ("rows", "dim"):
            what = f"table {self.name!r}: {field}"
            object.__setattr__(self, field, whole_number(getattr(self, field), what))
        if self.rows < 0 or (self.rows == 0 and self.ids.kind == "hash"):
            raise OperError(f"table {self.name!r}: expected at least 1 row, got {self.rows}")
        if self.rows > _MOST_ROWS:
            raise OperError(
                f"table {self.name!r}: {self.rows:,} rows, and at most {_MOST_ROWS:,} are supported"
            )
        if not 1 <= self.dim <= _MOST_DIM:
            raise OperError(
                f"table {self.name!r}: expected dim 1 to {_MOST_DIM:,}, got {self.dim:,}"
            )
        for field in ("dtype", "optimizer", "pooling"):
            if getattr(self, field) not in CHOICES[field]:
                raise OperError(
                    f"table {self.name!r}: {field} {getattr(self, field)!r} is unknown; known "
                    f"are {', '.join(CHOICES[field])}"
                )
        if self.ids.kind not in CHOICES["ids"]:
            raise OperError(
                f"table {self.name!r}: ids {self.ids.kind!r} is unknown; known are "
                "dense, hash and vocab"
            )
        if self.ids.min_count < 1:
            raise OperError(
                f"table {self.name!r}: expected min_count of at least 1, got {self.ids.min_count}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The log's columns that index this table."""
        return self.features or (self.name,)

    @property
    def row_bytes(self) -> int:
        """S: bytes of one row in a message."""
        extra = _INT8_EXTRA_BYTES if self.dtype == "int8" else 0
        return self.dim * _BYTES_PER_VALUE[self.dtype] + extra

    def memory_bytes(self, mode: str) -> int:
        """Return m: bytes of one stored row, with its optimizer state if `mode` is "training"."""
        if mode != "training":
            return self.row_bytes
        per_value, per_row = _OPTIMIZER_STATE[self.optimizer]
        return self.row_bytes + _STATE_BYTES * (per_value * self.dim + per_row)

    def describe(self) -> str:
        """Return all properties except the name, for errors that compare two tables."""
        rule = [self.optimizer, f"ids: {self.ids.kind}"]
        if self.ids.kind == "vocab":
            rule.append(f"min_count {self.ids.min_count}")
        if self.ids.missing is not None:
            rule.append(f"missing {self.ids.missing}")
        return (
            f"{self.rows:,} row{'' if self.rows == 1 else 's'} of dim {self.dim}, {self.dtype} "
            f"({', '.join(rule)}) for {', '.join(self.columns)}"
        )

    @classmethod
    def of_model(cls, model: Any, *, optimizer: str = OPTIMIZER) -> "dict[str, Table]":
        """Return the tables of a model, by the names of their parameters in its
        `named_parameters()`.

        Args:
            model: a `torch.nn.Module` with TorchRec's embedding (bag) collections, unsharded or
                sharded by TorchRec or OPER. Parameters of sharded tables are empty on a rank, so
                only this function has their sizes.
            optimizer: optimizer of tables whose parameters do not name it, such as sharded ones.

        Raises:
            OperError: the model has no collection, two of its tables have one name, or a table has
                a dtype or optimizer that is not supported.
        """
        tables = {table.name: table for table in tables_of(model, optimizer=optimizer)}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return {
            names[id(holder.weight)]: tables[name]
            for _, collection in collections_of(model)
            for name, holder in _weights(collection).items()
        }

    @property
    def parameters(self) -> int:
        """Values in all rows, as `numel` of an unsharded table's weight."""
        return self.rows * self.dim

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON holds it."""
        return asdict(self) | {"features": list(self.features), "ids": self.ids.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Table":
        """Return the inverse of `to_dict`."""
        return cls(
            **{
                **content,
                "features": tuple(content["features"]),
                "ids": IdRule.from_dict(content["ids"]),
            }
        )


def check_names(tables: Sequence[Table], where: str) -> None:
    """Raise OperError if two tables have one name, by which models, logs and plans tell them
    apart."""
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        [(repeated, _)] = Counter(names).most_common(1)
        raise OperError(
            f"{where}: two tables are called {repeated!r}; give each table a name of its own"
        )


def index_of(tables: Sequence[Table], name: str, where: str) -> int:
    """Return the number of the table called `name`; raise OperError if there is none."""
    for index, table in enumerate(tables):
        if table.name == name:
            return index
    raise OperError(
        f"table {name!r}: {where} has no such table; it has "
        + ", ".join(table.name for table in tables[:8])
        + (", …" if len(tables) > 8 else "")
    )


def check_known(tables: Sequence[Table], where: str) -> None:
    """Raise OperError if there are no tables, two have one name, or one has no rows yet."""
    if not tables:
        raise OperError(f"{where}: expected at least one table, got none")
    check_names(tables, where)
    for table in tables:
        if table.rows == 0:
            raise OperError(
                f"{where}: table {table.name!r} has 0 rows; state them, or let oper.profile take "
                "them from a log"
            )


def fingerprint(tables: Sequence[Table]) -> str:
    """Return the hex SHA-256 of all properties that a placement depends on, without pooling and
    without vocabularies, which may grow (row_identity.py compares these)."""
    plain = (replace(t, ids=replace(t.ids, vocabulary=None)) for t in tables)
    content = [{k: v for k, v in t.to_dict().items() if k != "pooling"} for t in plain]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def offsets(tables: Sequence[Table]) -> NDArray[np.int64]:
    """Return the global row id of each table's row 0, and the number of all rows: int64 [T + 1]."""
    result = np.zeros(len(tables) + 1, dtype=np.int64)
    np.cumsum([t.rows for t in tables], out=result[1:])
    return result


def with_missing(tables: Sequence[Table], missing: str | None) -> tuple[Table, ...]:
    """Return the tables, with `missing` added to the id rules that have no such value."""
    return tuple(
        replace(t, ids=replace(t.ids, missing=missing)) if t.ids.missing is None else t
        for t in tables
    )


def tables_of(module: Any, *, optimizer: str = OPTIMIZER) -> tuple[Table, ...]:
    """Return the tables of every TorchRec embedding (bag) collection in a `torch.nn.Module`.

    Sizes, dtype, pooling and features are taken from the configs; the optimizer is the one that
    `apply_optimizer_in_backward` gave the table, else `optimizer`. Ids are dense. Raise OperError
    if the module has no collection, or a table has an unsupported dtype or optimizer.
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
    """Return the tables of a list of `Table`s or of TorchRec's configs, by the rules of
    `tables_of`; raise OperError if it is neither."""
    expected = (
        "expected oper.Table, or TorchRec's EmbeddingBagConfig or EmbeddingConfig, in a list; or a "
        "model, a profile, a file of tables, or None"
    )
    if not isinstance(given, Sequence):
        raise OperError(f"tables: {expected}; got {type(given).__name__}")
    tables = []
    for number, item in enumerate(given):
        if isinstance(item, Table):
            tables.append(item)
        elif all(hasattr(item, name) for name in _CONFIG):
            tables.append(_table_of(item, OPTIMIZER))
        else:
            raise OperError(f"tables[{number}]: {expected}; got {type(item).__name__}")
    return tuple(tables)


def collections_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the embedding (bag) collections of a module by their path, unsharded ones and those
    that TorchRec or OPER sharded."""
    within: list[str] = []  # Parts of a collection are not collections themselves.
    for path, inner in module.named_modules():
        if configs_of(inner) is not None and not any(path.startswith(f"{p}.") for p in within):
            within.append(path)
            yield path, inner


def tables_of_collection(collection: Any, *, optimizer: str = OPTIMIZER) -> tuple[Table, ...]:
    """Return the tables of one collection, by the rules of `tables_of`. All tables of a sharded
    collection get `optimizer`, because its parameters no longer name theirs."""
    weights, tables = _weights(collection), []
    for config in configs_of(collection) or ():
        parameter = weights[config.name].weight if config.name in weights else None
        tables.append(_table_of(config, _optimizer_of(parameter, optimizer)))
    return tuple(tables)


def _weights(collection: Any) -> Any:
    """Return the modules that hold the weight of each table, by its name."""
    return getattr(collection, "embedding_bags", None) or getattr(collection, "embeddings", {})


def configs_of(collection: Any) -> Sequence[Any] | None:
    """Return the configs of a collection's tables, unsharded or not; None for another module."""
    for name in ("embedding_bag_configs", "embedding_configs"):
        # Collections that TorchRec sharded have the configs as an attribute.
        configs: Any = getattr(collection, name, None) or getattr(collection, f"_{name}", None)
        if configs is not None:
            return list(configs() if callable(configs) else configs)
    return None


def _table_of(config: Any, optimizer: str) -> Table:
    dtype = _TORCHREC_DTYPES.get(config.data_type.name)
    if dtype is None:
        raise OperError(
            f"table {config.name!r}: expected dtype {', '.join(_TORCHREC_DTYPES)}, got "
            f"{config.data_type.name}"
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
    """Return the fused optimizer that was put on an unsharded parameter, if any."""
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
