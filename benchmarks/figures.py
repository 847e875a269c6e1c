"""Figures of README.md and docs/results.md, which docs/figures.json keeps.

A statement is a piece of a page with a field for each figure: `{name:.2f}` stands for its value,
`{name:up2}` for the value rounded up to two decimals ("at most"), and `{commit}` for the commits
that the statement's figures are of. Run without options the script writes the figures into the
pages.

    python -m benchmarks.figures
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from benchmarks.common import REPOSITORY

KEPT = REPOSITORY / "docs" / "figures.json"
STATEMENTS: dict[str, tuple[str, ...]] = {
    "README.md": (
        "in a Criteo log the hottest 1 % of the rows take"
        " {criteo-log-reads-of-hottest-percent:.0f} % of the reads",
        "*predicted* to take {criteo-log-2x8-h100-held-out-torchrec-times:.2f} times as long with",
        "| OPER | {criteo-log-dgx-h100-held-out-oper:.2f} µs"
        " | {criteo-log-2x8-h100-held-out-oper:.1f} µs |",
        "| TorchRec's | {criteo-log-dgx-h100-held-out-torchrec-times:.2f} times as long"
        " | {criteo-log-2x8-h100-held-out-torchrec-times:.2f} times as long |",
        "| table-wise | {criteo-log-dgx-h100-held-out-table_wise-times:.2f} times"
        " | {criteo-log-2x8-h100-held-out-table_wise-times:.2f} times |",
        "| row-wise | {criteo-log-dgx-h100-held-out-row_wise-times:.2f} times"
        " | {criteo-log-2x8-h100-held-out-row_wise-times:.2f} times |",
        "takes {held-out-training-step-mean:.2f} times as long in training (mean; largest"
        " {held-out-training-step-most:.2f}) and {held-out-inference-step-mean:.2f} in inference"
        " (largest {held-out-inference-step-most:.2f}) as with",
        "transfers take {held-out-training-transfer-mean:.2f}"
        " ({held-out-training-transfer-most:.2f}) and {held-out-inference-transfer-mean:.2f}"
        " ({held-out-inference-transfer-most:.2f}) times",
        "has transfers more than {gap-presets-percent:up2} % shorter",
        "the two plans above are certified within {criteo-log-dgx-h100-held-out-gap-percent:up2} %"
        " and {criteo-log-2x8-h100-held-out-gap-percent:up2} %.",
        "(data of the plan):** {criteo-log-dgx-h100-fitted-paper-times:.3f} times as long as"
        " OPER's plan on 8 H100, {criteo-log-2x8-h100-fitted-paper-times:.2f} times on 2 nodes.",
        "| {plan-kaggle-training-seconds:.1f} s to plan 33.8 million rows |",
        "by default {plan-kaggle-training-default-seconds:.2f} s in training,"
        " {plan-kaggle-inference-default-seconds:.2f} s in inference",
        "| {plan-syn-large-seconds:.0f} s to plan 2.5 billion rows | Syn-Large, 4 nodes of 4 ranks;"
        " the planner uses {plan-syn-large-resident-gb:.1f} GB",
        "| step {step-1-sgd-2-64-8192:.1f} times (dim 64) and {step-1-sgd-2-16-8192:.1f} times"
        " (dim 16) as fast as TorchRec's best sharding |",
        "| {bags-20-sgd-2-64-4096:.1f} and {bags-20-sgd-2-16-4096:.1f} times; the whole DLRM"
        " {dlrm-1-sgd-2-64-8192:.1f} and {dlrm-1-sgd-2-16-8192:.1f} times | the same with 20",
        "| lookup {lookup-over-fbgemm-warm-huge-pages:.1f} times as fast as FBGEMM's CPU kernel |",
        "{lookup-over-fbgemm-warm:.1f} times if FBGEMM's table is in ordinary pages",
    ),
    "docs/results.md": (
        "on disk, 5 % extra memory, training (inference) | {plan-kaggle-training-seconds:.2f}"
        " ({plan-kaggle-inference-seconds:.2f}) s | 120.3 s | `{commit}` |",
        "| the same by default | {plan-kaggle-training-default-seconds:.2f}"
        " ({plan-kaggle-inference-default-seconds:.2f}) s | – | `{commit}` |",
        "lookups, links; memory max/min | {plan-kaggle-training-lookups-percent:.3f} %,"
        " {plan-kaggle-training-links-percent:.3f} %;"
        " {plan-kaggle-training-memory-max-over-min:.3f} | 99.1 % | `{commit}` |",
        "8 ranks, on a busy machine | {plan-terabyte-seconds:.1f} s,"
        " {plan-terabyte-resident-gb:.1f} GB resident | – | `{commit}` |",
        "4 nodes of 4 | {plan-syn-large-seconds:.0f} s, {plan-syn-large-resident-gb:.1f} GB"
        " resident | – | `{commit}` |",
        "| address map, 5 % extra memory | {translate-criteo-kaggle-5%-bytes-per-row:.3f} bytes per"
        " row, {translate-criteo-kaggle-5%-million-per-second:.0f} million translations/s per core"
        " | – | `{commit}` |",
        "SGD, dim 64, batch 8,192 a rank | {step-1-sgd-2-64-8192:.1f} ({step-1-sgd-4-64-8192:.1f})"
        " times | – | `{commit}` |",
        "| the same at dim 16 | {step-1-sgd-2-16-8192:.1f} ({step-1-sgd-4-16-8192:.1f}) times | –"
        " | `{commit}` |",
        "batch 4,096, dim 64 (16), 2 ranks | {bags-20-sgd-2-64-4096:.1f}"
        " ({bags-20-sgd-2-16-4096:.1f}) times | – | `{commit}` |",
        "whole DLRM, one id per bag, batch 8,192, dim 64 (16), 2 ranks | {dlrm-1-sgd-2-64-8192:.1f}"
        " ({dlrm-1-sgd-2-16-8192:.1f}) times | – | `{commit}` |",
        "2 CPU ranks, dim 64 (16), batch 8,192 | {lookup-1-sgd-2-64-8192:.1f}"
        " ({lookup-1-sgd-2-16-8192:.1f}) times | – | `{commit}` |",
        "(with a reused one) | {lookup-over-fbgemm-cold:.1f} ({lookup-over-fbgemm-warm:.1f}) times"
        " | – | `{commit}` |",
        "from arrays in memory | {count-million-per-second:.0f} million/s | – | `{commit}` |",
        "0.1 to 20 % extra memory | at most {gap-presets-percent:up2} % | none | `{commit}` |",
        "above a relaxed bound) | at most {gap-unequal-up-to-16-percent:up2} %"
        " ({gap-unequal-24-percent:up1} %) | – | `{commit}` |",
        "2 nodes of 8 H100 | at most {criteo-log-dgx-h100-held-out-gap-percent:up2} %"
        " ({criteo-log-dgx-h100-fitted-gap-percent:up2} %);"
        " {criteo-log-2x8-h100-held-out-gap-percent:up2} %"
        " ({criteo-log-2x8-h100-fitted-gap-percent:up2} %) | – | `{commit}` |",
        "mean of {held-out-training-cases:.0f} cases each | {held-out-training-step-mean:.2f}"
        " ({held-out-inference-step-mean:.2f}); at most {held-out-training-step-most:.2f}"
        " ({held-out-inference-step-most:.2f}) | – | `{commit}` |",
        "Zipf 1.1 (1.05) | {replication-criteo-kaggle-zipf-1_1:.1f}"
        " ({replication-criteo-kaggle-zipf-1_05:.1f}) times less than without"
        " | 7.1 times, on its own log | `{commit}` |",
        "real Criteo sample, held out (fitted) | {replication-criteo-80k-held-out:.1f}"
        " ({replication-criteo-80k:.1f}) times less | – | `{commit}` |",
        "`--fetch raw --balance link` (by default) | {links-criteo-kaggle-raw-even-percent:.3f} %"
        " ({links-criteo-kaggle-distinct-by-time-percent:.0f} %) apart | about 1 % | `{commit}` |",
        "(`--fetch distinct --balance link`) | {links-criteo-80k-raw-even-percent:.2f} %"
        " ({links-criteo-80k-distinct-even-percent:.1f} %) apart | – | `{commit}` |",
        "training (inference) | {simulated-training-least-times:.2f} to"
        " {simulated-training-most-times:.1f} ({simulated-inference-least-times:.1f} to"
        " {simulated-inference-most-times:.0f}) times | – | `{commit}` |",
        "| OPER | {criteo-log-dgx-h100-held-out-oper:.2f}"
        " ({criteo-log-dgx-h100-fitted-oper:.2f}) µs"
        " | {criteo-log-2x8-h100-held-out-oper:.1f} ({criteo-log-2x8-h100-fitted-oper:.1f}) µs"
        " | `{commit}` |",
        "| TorchRec's | {criteo-log-dgx-h100-held-out-torchrec:.1f}"
        " ({criteo-log-dgx-h100-fitted-torchrec:.1f}) µs"
        " | {criteo-log-2x8-h100-held-out-torchrec:.1f}"
        " ({criteo-log-2x8-h100-fitted-torchrec:.1f}) µs | `{commit}` |",
        "| table-wise | {criteo-log-dgx-h100-held-out-table_wise:.1f}"
        " ({criteo-log-dgx-h100-fitted-table_wise:.1f}) µs"
        " | {criteo-log-2x8-h100-held-out-table_wise:.1f}"
        " ({criteo-log-2x8-h100-fitted-table_wise:.1f}) µs | `{commit}` |",
        "| row-wise | {criteo-log-dgx-h100-held-out-row_wise:.1f}"
        " ({criteo-log-dgx-h100-fitted-row_wise:.1f}) µs"
        " | {criteo-log-2x8-h100-held-out-row_wise:.1f}"
        " ({criteo-log-2x8-h100-fitted-row_wise:.1f}) µs | `{commit}` |",
        "| the paper's procedure | – ({criteo-log-dgx-h100-fitted-paper:.2f}) µs"
        " | – ({criteo-log-2x8-h100-fitted-paper:.1f}) µs | `{commit}` |",
    ),
}


def say(value: float, form: str) -> str:
    """Return a value as text by a format, or with so many decimals rounded up."""
    if not form.startswith("up"):
        return format(value, form)
    scale = 10 ** int(form.removeprefix("up"))
    return f"{math.ceil(value * scale - 1e-9) / scale:.{form.removeprefix('up')}f}"


def restate(text: str, statement: str, kept: Mapping[str, Any]) -> str:
    """Return the text of a page with the kept figures in one statement; spaces in the statement
    stand for line ends too.

    Raises ValueError unless the statement is in the page once, and KeyError for a figure that is
    not kept.
    """
    pattern, said, commits = "", [], set()
    for words, name, form, _ in Formatter().parse(statement):
        pattern += r"\s+".join(re.escape(word) for word in words.split(" "))
        if name is None:
            continue
        pattern += r"([\w, -]+)" if name == "commit" else r"([\d.,]+)"
        if name == "commit":
            said.append("")
            continue
        commits.add(kept[name]["commit"])
        said.append(say(kept[name]["value"], form or ""))
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise ValueError(
            f"expected the statement once in the page, found {len(found)}: {statement}"
        )
    for n in reversed(range(len(said))):
        start, end = found[0].span(n + 1)
        text = text[:start] + (said[n] or ", ".join(sorted(commits))) + text[end:]
    return text


def restated(page: str, kept: Mapping[str, Any]) -> str:
    """Return the text of a page with all kept figures."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for statement in STATEMENTS[page]:
        text = restate(text, statement, kept)
    return text


def main() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    for page in STATEMENTS:
        Path(REPOSITORY / page).write_text(restated(page, kept), encoding="utf-8")


if __name__ == "__main__":
    main()
