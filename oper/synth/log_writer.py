"""Write a synthetic log as Parquet: label, I1 … I13, and one column per table, lists for bags.

One row group per batch, so that one batch is in memory at a time; the same seed gives the same
bytes. The tables are written to a YAML file next to the log, because a log does not show rows that
it never accesses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from oper.base.errors import OperError
from oper.files.overwrite_rules import FILE_MARK
from oper.files.storage import atomic_file, check_output
from oper.logs.batches.batch import Batch
from oper.synth.label_model import DENSE_COLUMNS, BayesAuc
from oper.synth.recipes import Recipe
from oper.synth.synthesizer import Synthesizer


@dataclass(frozen=True)
class Written:
    """The files, the clicks per sample, and the AUC of the best possible predictor."""

    log: Path
    tables: Path
    click_rate: float
    bayes_auc: float


def write_log(
    synthesizer: Synthesizer,
    path: Path | str,
    advance: Callable[[int], None] = lambda samples: None,
    overwrite: bool = False,
) -> Written:
    """Write the log to `path` and its tables to `STEM.tables.yaml` next to it.

    `advance` is called with the number of samples written. Raise OperError if `path` does not end
    in .parquet, a file exists and `overwrite` is false, or writing fails.
    """
    import pyarrow.parquet as pq

    path = Path(path)
    if path.suffix != ".parquet":
        raise OperError(f"{path}: a log is written as Parquet; let its name end in .parquet")
    tables = path.with_name(f"{path.stem}.tables.yaml")
    for written in (path, tables):
        check_output(written, overwrite=overwrite)
    auc, clicks = BayesAuc(), 0.0
    schema = _schema(synthesizer.recipe)
    with (
        atomic_file(path, overwrite) as temporary,
        pq.ParquetWriter(temporary, schema) as writer,
    ):
        for batch in synthesizer.batches(auc):
            writer.write_table(_arrow(batch, schema), row_group_size=batch.samples)
            assert batch.label is not None
            clicks += float(batch.label.sum())
            advance(batch.samples)
    with atomic_file(tables, overwrite) as temporary:
        temporary.write_text(_tables_yaml(synthesizer.recipe), encoding="utf-8")
    return Written(path, tables, clicks / synthesizer.samples, auc.value)


def _schema(recipe: Recipe) -> Any:
    import pyarrow as pa

    fields = [pa.field("label", pa.int8()), *(pa.field(n, pa.float32()) for n in DENSE_COLUMNS)]
    for feature in recipe.features:
        ids = pa.int32() if feature.table.rows <= 1 << 31 else pa.int64()
        kind = pa.list_(ids) if feature.bagged else ids
        fields.append(pa.field(feature.table.name, kind))
    return pa.schema(fields, metadata={FILE_MARK: ""})


def _arrow(batch: Batch, schema: Any) -> Any:
    import pyarrow as pa

    assert batch.label is not None
    assert batch.dense is not None
    columns = [pa.array(batch.label.astype(np.int8))]
    columns += [pa.array(np.ascontiguousarray(values)) for values in batch.dense.T]
    for name, ids in batch.features.items():
        kind = schema.field(name).type
        if ids.lengths is None:
            columns.append(pa.array(ids.values, type=kind))
        else:
            offsets = pa.array(ids.offsets(), type=pa.int32())
            values = pa.array(ids.values, type=kind.value_type)
            columns.append(pa.ListArray.from_arrays(offsets, values, type=kind))
    return pa.table(columns, schema=schema)


def _tables_yaml(recipe: Recipe) -> str:
    tables = [{"name": t.name, "rows": t.rows, "dim": t.dim} for t in recipe.tables]
    text = yaml.safe_dump({"tables": tables}, sort_keys=False, default_flow_style=None)
    return f"# {FILE_MARK}\n{text}"
