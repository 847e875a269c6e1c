"""How many examples a hypothesis test draws, and tests that leave drawn examples out."""

import functools
from collections.abc import Callable
from typing import Any

from hypothesis import settings

# Of the profile `quick`, by which all other numbers of examples are said.
QUICK_EXAMPLES = 50


def examples(quick: int, **others: Any) -> settings:
    """Return settings of a test that draws `quick` examples under the profile `quick`, and in
    proportion under other profiles. `others` are other settings of hypothesis."""
    return settings(max_examples=_in_proportion(quick), **others)


def at_least(examples: int) -> Callable[[Any], Any]:
    """Fail a hypothesis test if fewer than `examples` ran to their end under the profile `quick`,
    in proportion under others. Examples that `assume` or `reject` leave out do not count. Write it
    above `settings` and `given`."""
    least = _in_proportion(examples)

    def decorate(test: Any) -> Any:
        one_example = test.hypothesis.inner_test
        ended: list[None] = []

        @functools.wraps(one_example)
        def counted(*arguments: Any, **named: Any) -> None:
            one_example(*arguments, **named)
            ended.append(None)

        test.hypothesis.inner_test = counted

        @functools.wraps(test)
        def all_examples(*arguments: Any, **named: Any) -> None:
            ended.clear()
            test(*arguments, **named)
            assert len(ended) >= least, f"{len(ended)} examples ran to their end"

        return all_examples

    return decorate


def _in_proportion(quick: int) -> int:
    """Return the number of examples under the profile in use for so many under `quick`; at least 3,
    as hypothesis tries the simplest example first."""
    return max(round(quick * settings().max_examples / QUICK_EXAMPLES), min(quick, 3))
