"""What all commands share: how they print, show progress and read shares and sizes."""

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable

from oper.base.errors import OperError

WIDTH = 100

FORCE = typer.Option(
    False,
    "--force",
    help="Replace what is at -o: a file, or a folder in which oper wrote everything.",
)


def console() -> Console:
    """Standard output, never wider than 100 columns."""
    real = Console()
    width = min(real.width, WIDTH) if real.is_terminal else WIDTH
    # Names come from logs, and one like a[b] is no markup.
    return Console(width=width, highlight=False, markup=False, emoji=False)


def warn(sentence: str) -> None:
    """A warning on standard error, which leaves standard output to the result."""
    print(f"warning: {sentence}", file=sys.stderr)


def warn_of_idle(context: typer.Context, needs: dict[str, str]) -> None:
    """Warn of options that were given and do nothing without another one that was not."""
    for option, needed in needs.items():
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE" and not context.params[needed]:
            name = option.replace("_", "-")
            warn(f"--{name}: has no effect without --{needed.replace('_', '-')}")


def emit(as_json: bool, content: dict[str, Any], text: Callable[[], None]) -> None:
    """Print `content` as one JSON object on standard output, or call `text` to print for people."""
    if as_json:
        json.dump(content, sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    else:
        text()


def table(*headers: str, title: str | None = None, left: int = 1) -> RichTable:
    """A table with the first `left` columns to the left and the numbers to the right."""
    made = RichTable(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for index, header in enumerate(headers):
        justify = "left" if index < left else "right"
        made.add_column(header, justify=justify, no_wrap=index >= left)  # type: ignore[arg-type]
    return made


class Meter:
    """A progress bar's handle: `advance` by what was done since."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self.advance = advance


@contextlib.contextmanager
def progress(description: str, total: float | None, unit: str = "") -> Iterator[Meter]:
    """A bar with rate and time left on standard error; silent where that is no terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
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
                bar.update(task, rate=f"{quantity(speed)} {unit}/s")

        yield Meter(advance)


@contextlib.contextmanager
def steps(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps that is told the name of each step as it begins."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield lambda step: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as bar:
        task = bar.add_task(description, total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=f"{description}: {name}")
            begun += 1

        yield step


def parse_share(text: str, name: str) -> float:
    """`5%` or `0.05` -> 0.05; OperError names the option.

    A bare number above 1 is refused: who writes 5 rather means 5% than 500%.
    """
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(%?)\s*", text)
    try:
        value = float(match[1]) / (100 if match[2] else 1) if match else float("nan")
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise OperError(f"{name} {text!r}: a share was needed, such as 5% or 0.05")
    if value > 1 and not text.rstrip().endswith("%"):
        raise OperError(f"{name} {text!r}: a bare number is a fraction; with % it is a percentage")
    return value


def quantity(value: float) -> str:
    """1234567 -> '1.23M', for people."""
    return "".join(_scaled(value))


def size(value: float) -> str:
    """Bytes for people, in powers of ten: '1.23 MB'."""
    number, suffix = _scaled(value)
    return f"{number} {suffix}B"


def _scaled(value: float) -> tuple[str, str]:
    """A number with three digits, and the power of ten it counts."""
    for limit, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:  # which rounds up to the limit
            return f"{value / limit:.3g}", suffix
    return f"{value:.3g}", ""


def counted(number: int, noun: str) -> str:
    """2, 'row' -> '2 rows'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def gap(value: float) -> str:
    """A certified gap, a fraction, as a percentage, rounded up: 1.23e-4 -> '0.0123%'."""
    return "<0.0001%" if value < 1e-6 else f"{math.ceil(1e6 * value) / 1e4:.4g}%"


def duration(seconds: float) -> str:
    """Seconds for people: µs, ms or s with four digits."""
    for limit, suffix in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= limit:
            return f"{seconds / limit:.4g} {suffix}"
    return f"{seconds * 1e6:.4g} µs"
