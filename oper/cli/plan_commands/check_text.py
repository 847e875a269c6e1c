"""The findings of a check, as `oper plan check` prints them."""

from typing import TYPE_CHECKING

from oper.base.formatting import format_digits
from oper.cli.shared.console import is_quiet, new_console

if TYPE_CHECKING:
    from oper.checker.findings import Findings


def print_check(found: "Findings", plan: str) -> None:
    """Print whether all invariants of a plan hold, and each of them, the violated ones first; with
    --quiet only these."""
    out = new_console()
    failed = f"{len(found.wrong)} of {len(found)} invariants do not hold"
    out.print(f"{plan}: {f'all {len(found)} invariants hold' if found.ok else failed}")
    held = () if is_quiet() else tuple(finding for finding in found if finding.ok)
    for finding in [*found.wrong, *held]:
        out.print(f"{'ok   ' if finding.ok else 'WRONG'} {finding.invariant}")
        if finding.wrong:
            out.print(f"      {finding.wrong}")
    for counted in () if is_quiet() else found.vectors:
        out.print(
            f"table {counted.table}: a bag needs {format_digits(counted.a_bag, 4)} vectors of "
            f"other nodes ({counted.bags:,} bags)"
        )
