"""Progress bars on standard error if that is a terminal, unless --quiet is given."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from oper.base.formatting import format_number
from oper.cli.shared.console import is_quiet


class Meter:
    """The handle of a progress bar: call `advance` with the amount of work done."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self.advance = advance


@contextlib.contextmanager
def progress(description: str, total: float | None, unit: str = "") -> Iterator[Meter]:
    """Show a bar with rate and time left on standard error, if that is a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal or is_quiet():
        yield Meter(lambda amount: None)
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
    ) as bar:
        task = bar.add_task(description, total=total, rate="")

        def advance(amount: float) -> None:
            bar.advance(task, amount)
            speed = bar.tasks[0].speed
            if speed:
                bar.update(task, rate=f"{format_number(speed)} {unit}/s")

        yield Meter(advance)


@contextlib.contextmanager
def steps(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of about `total` steps; call the result with the name of each step as it begins.

    The bar is full only at the end: it grows with the steps beyond `total`.
    """
    errors = Console(stderr=True)
    if not errors.is_terminal or is_quiet():
        yield lambda step: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as bar:
        task = bar.add_task(description, total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(
                task,
                completed=begun,
                total=max(total, begun + 1),
                description=f"{description}: {name}",
            )
            begun += 1

        yield step
