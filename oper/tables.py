"""Tables: how many rows, how wide, how trained, and which columns of a log index them.

A row of table t takes S bytes as it travels and m bytes where it is stored, which in training
counts its optimizer state. Rows of all tables are numbered through: GLOBAL ROW ID =
offsets(tables)[t] + row.

Tables come from a YAML or JSON file, from the configs of a TorchRec module, from a published data
set by name, or from a log itself (`oper.logs.infer_tables`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oper.errors import OperError
from oper.yaml_file import Document, Place

IdKind = Literal["dense", "hash", "vocab"]

_BYTES_PER_VALUE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
# FBGEMM's row-wise 8-bit tables store an fp32 scale and bias with each row.
_INT8_EXTRA_BYTES = 8
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
_MOST_ROWS = 2**40  # slots that an address can name
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": tuple(_BYTES_PER_VALUE),
    "optimizer": tuple(_OPTIMIZER_STATE),
    "pooling": ("sum", "mean", "none"),
    "ids": ("dense", "hash", "vocab"),
}


@dataclass(frozen=True)
class IdRule:
    """How a raw value of the log becomes a row.

    dense: the value is the row. hash: the value, or a stated hash of a text, modulo the table's
    rows. vocab: the rank of the value by descending count among those counted at least
    `min_count` times; all others go to row 0. `missing` is a value that stands for no id; nulls
    and empty fields always do.
    """

    kind: IdKind = "dense"
    min_count: int = 1
    missing: str | None = None


@dataclass(frozen=True)
class Table:
    """One embedding table.

    `rows` is 0 where a log is still to say it (dense: the largest id + 1; vocab: the size of the
    vocabulary). `features` are the log's columns that index the table; none means the column of
    the table's own name.
    """

    name: str
    rows: int
    dim: int = 64
    dtype: str = "fp32"
    optimizer: str = "rowwise_adagrad"
    pooling: str = "sum"
    features: tuple[str, ...] = ()
    ids: IdRule = IdRule()

    def __post_init__(self) -> None:
        if not self.name:
            raise OperError("a table has an empty name; give it one")
        if self.rows < 0 or (self.rows == 0 and self.ids.kind == "hash"):
            raise OperError(f"table {self.name!r}: {self.rows} rows, and at least 1 was needed")
        if self.rows > _MOST_ROWS:
            raise OperError(
                f"table {self.name!r}: {self.rows:,} rows, and at most {_MOST_ROWS:,} are supported"
            )
        if self.dim < 1:
            raise OperError(f"table {self.name!r}: dim {self.dim}, and at least 1 was needed")
        for field in ("dtype", "optimizer", "pooling"):
            if getattr(self, field) not in _CHOICES[field]:
                raise OperError(
                    f"table {self.name!r}: {field} {getattr(self, field)!r} is none of "
                    f"{', '.join(_CHOICES[field])}"
                )
        if self.ids.kind not in _CHOICES["ids"]:
            raise OperError(
                f"table {self.name!r}: ids {self.ids.kind!r} is none of dense, hash, vocab"
            )
        if self.ids.min_count < 1:
            raise OperError(
                f"table {self.name!r}: min_count {self.ids.min_count}, and at least 1 was needed"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The log's columns that index this table."""
        return self.features or (self.name,)

    @property
    def row_bytes(self) -> int:
        """S: bytes of one row as it travels."""
        extra = _INT8_EXTRA_BYTES if self.dtype == "int8" else 0
        return self.dim * _BYTES_PER_VALUE[self.dtype] + extra

    def memory_bytes(self, mode: str) -> int:
        """m: bytes of one stored row, with its optimizer state where `mode` is "training"."""
        if mode != "training":
            return self.row_bytes
        per_value, per_row = _OPTIMIZER_STATE[self.optimizer]
        return self.row_bytes + _STATE_BYTES * (per_value * self.dim + per_row)

    def describe(self) -> str:
        """All that tells it from a table of the same name, for errors that compare two."""
        rule = [self.optimizer, f"ids: {self.ids.kind}"]
        if self.ids.kind == "vocab":
            rule.append(f"min_count {self.ids.min_count}")
        if self.ids.missing is not None:
            rule.append(f"missing {self.ids.missing}")
        return (
            f"{self.rows:,} row{'' if self.rows == 1 else 's'} of dim {self.dim}, {self.dtype} "
            f"({', '.join(rule)}) for {', '.join(self.columns)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON holds it."""
        return asdict(self) | {"features": list(self.features)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Table":
        """The inverse of `to_dict`."""
        return cls(
            **{
                **content,
                "features": tuple(content["features"]),
                "ids": IdRule(**content["ids"]),
            }
        )


def fingerprint(tables: Sequence[Table]) -> str:
    """Hex SHA-256 over what a plan depends on: two lists of tables with equal ones are alike."""
    content = [{k: v for k, v in t.to_dict().items() if k != "pooling"} for t in tables]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def offsets(tables: Sequence[Table]) -> NDArray[np.int64]:
    """Global row id of each table's row 0, and the number of all rows: int64 [T + 1]."""
    result = np.zeros(len(tables) + 1, dtype=np.int64)
    np.cumsum([t.rows for t in tables], out=result[1:])
    return result


def load_tables(
    spec: Path | str,
    *,
    dim: int = 64,
    dtype: str = "fp32",
    optimizer: str = "rowwise_adagrad",
    ids: IdKind = "dense",
) -> tuple[Table, ...]:
    """The tables of a YAML or JSON file, or of a published data set by name.

    A file is a list of tables, or a mapping of `tables` to that list and `defaults` to what holds
    for tables that do not say. The arguments hold where neither does. OperError names the file,
    line, table and value.
    """
    base = {"dim": dim, "dtype": dtype, "optimizer": optimizer, "ids": IdRule(ids)}
    if str(spec) in published_names():
        return _published(str(spec), base)
    path = Path(spec)
    if not path.is_file():
        raise OperError(
            f"--tables {str(spec)!r}: is neither a file nor a published data set "
            f"({', '.join(published_names())})"
        )
    return _from_document(Document.read(path), base)


def published_names() -> tuple[str, ...]:
    """The data sets whose tables `load_tables` knows by name."""
    return tuple(_published_facts())


def _published_facts() -> dict[str, Any]:
    text = resources.files("oper").joinpath("data/published.json").read_text(encoding="utf-8")
    return json.loads(text)


def _published(name: str, base: dict[str, Any]) -> tuple[Table, ...]:
    facts = _published_facts()[name]
    rows = facts["rows"]
    if isinstance(rows, dict):
        rows = [rows["each"]] * rows["tables"]
    names = facts["names"]
    if isinstance(names, str):
        names = [names.format(index) for index in range(len(rows))]
    return tuple(Table(name=n, rows=r, **base) for n, r in zip(names, rows, strict=True))


def _from_document(document: Document, base: dict[str, Any]) -> tuple[Table, ...]:
    content = document.content
    place: Place = ()
    if isinstance(content, dict):
        unknown = set(content) - {"tables", "defaults"}
        if unknown or "tables" not in content:
            first = min(map(str, unknown)) if unknown else None
            document.fail(
                (first,) if first else (),
                "is unknown here; `tables` and `defaults` were expected"
                if first
                else "has no `tables`; a list of tables was needed",
            )
        base = base | _settings(document, ("defaults",), content.get("defaults") or {})
        content, place = content["tables"], ("tables",)
    if not isinstance(content, list) or not content:
        document.fail(place, "is no list of tables; write one entry `- name: …` for each table")
    tables = tuple(
        _table(document, (*place, index), entry, base) for index, entry in enumerate(content)
    )
    _check_names(document, place, tables)
    return tables


def _table(document: Document, place: Place, entry: Any, base: dict[str, Any]) -> Table:
    if not isinstance(entry, dict):
        document.fail(place, f"is {entry!r}, and a mapping with `name` and `rows` was needed")
    settings = base | _settings(document, place, entry)
    if "name" not in settings:
        document.fail(place, "has no name; add `name: …`")
    if settings["ids"].kind == "hash" and "rows" not in settings:
        document.fail(place, f"table {settings['name']!r} has no rows; `ids: hash` needs them")
    try:
        return Table(**({"rows": 0} | settings))
    except OperError as error:
        document.fail(place, str(error))


def _settings(document: Document, place: Place, entry: Any) -> dict[str, Any]:
    """The stated fields of a table, or of the defaults, each checked for its type."""
    if not isinstance(entry, dict):
        document.fail(place, f"is {entry!r}, and a mapping was needed")
    result: dict[str, Any] = {}
    for key, value in entry.items():
        here = (*place, str(key))
        if key in ("rows", "dim"):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                document.fail(here, f"is {value!r}, and a whole number from 1 was needed")
            result[key] = value
        elif key == "name":
            if not isinstance(value, str | int):
                document.fail(here, f"is {value!r}, and a name was needed")
            result[key] = str(value)
        elif key in ("dtype", "optimizer", "pooling"):
            if value not in _CHOICES[key]:
                document.fail(here, f"is {value!r}; known are {', '.join(_CHOICES[key])}")
            result[key] = value
        elif key == "features":
            result[key] = _features(document, here, value)
        elif key == "ids":
            result[key] = _rule(document, here, value)
        else:
            document.fail(
                here,
                "is unknown; a table has name, rows, dim, dtype, optimizer, pooling, features, ids",
            )
    return result


def _features(document: Document, place: Place, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str | int) else value
    if not isinstance(names, list) or not all(isinstance(n, str | int) for n in names):
        document.fail(place, f"is {value!r}, and a list of the log's columns was needed")
    return tuple(map(str, names))


def _rule(document: Document, place: Place, value: Any) -> IdRule:
    fields = {"kind": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or fields.get("kind") not in _CHOICES["ids"]:
        document.fail(place, f"is {value!r}; dense, hash or vocab was needed (alone, or as `kind`)")
    unknown = set(fields) - {"kind", "min_count", "missing"}
    if unknown:
        document.fail((*place, min(map(str, unknown))), "is unknown; kind, min_count, missing are")
    min_count = fields.get("min_count", 1)
    if not isinstance(min_count, int) or isinstance(min_count, bool) or min_count < 1:
        document.fail((*place, "min_count"), f"is {min_count!r}; a whole number from 1 was needed")
    missing = fields.get("missing")
    return IdRule(fields["kind"], min_count, None if missing is None else str(missing))


def _check_names(document: Document, place: Place, tables: Sequence[Table]) -> None:
    seen: dict[str, int] = {}
    for index, table in enumerate(tables):
        if table.name in seen:
            document.fail(
                (*place, index),
                f"names table {table.name!r} again, first in entry {seen[table.name]}; "
                "names must differ",
            )
        seen[table.name] = index


_TORCHREC_DTYPES = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8"}
_TORCH_OPTIMIZERS = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RowWiseAdagrad": "rowwise_adagrad",
    "Adam": "adam",
    "PartialRowWiseAdam": "partial_rowwise_adam",
}


def tables_of(module: Any, *, optimizer: str = "rowwise_adagrad") -> tuple[Table, ...]:
    """The tables of every TorchRec embedding (bag) collection in a `torch.nn.Module`.

    Sizes, dtype, pooling and features are the configs'; the optimizer is the one that
    `apply_optimizer_in_backward` gave the table, else `optimizer`. Ids are dense. OperError where
    the module holds no collection or a table of a dtype that is not supported.
    """
    tables: list[Table] = []
    for inner in module.modules():
        if hasattr(inner, "embedding_bag_configs"):
            configs, weights = inner.embedding_bag_configs(), getattr(inner, "embedding_bags", {})
        elif hasattr(inner, "embedding_configs"):
            configs, weights = inner.embedding_configs(), getattr(inner, "embeddings", {})
        else:
            continue
        for config in configs:
            parameter = weights[config.name].weight if config.name in weights else None
            tables.append(_table_of(config, _optimizer_of(parameter, optimizer)))
    if not tables:
        raise OperError(
            f"{type(module).__name__}: holds no TorchRec EmbeddingBagCollection or "
            "EmbeddingCollection; pass a module that does"
        )
    repeated = {t.name for t in tables if sum(u.name == t.name for u in tables) > 1}
    if repeated:
        raise OperError(
            f"{type(module).__name__}: several collections have a table {min(repeated)!r}; "
            "give each table a name of its own"
        )
    return tuple(tables)


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
            f"optimizer {name} of a table: its state per row is not known; known are "
            f"{', '.join(_TORCH_OPTIMIZERS)}"
        )
    return _TORCH_OPTIMIZERS[name]


def with_missing(tables: Sequence[Table], missing: str | None) -> tuple[Table, ...]:
    """The tables with `missing` in the rules that name no such value themselves."""
    return tuple(
        replace(t, ids=replace(t.ids, missing=missing)) if t.ids.missing is None else t
        for t in tables
    )
