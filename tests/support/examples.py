"""How many examples a hypothesis test draws, and tests that leave drawn examples out."""

import functools
from collections.abc import Callable
from typing import Any

from hypothesis import settings

# Of the profile `quick`, by which all other numbers of examples are said.
QUICK_EXAMPLES = 50


def examples(quick: int, **others: Any) -> settings:
    """Settings of a test that draws `quick` examples under the profile `quick`, and under another
    one as many times more as that profile has. `others` are other settings of hypothesis."""
    number = round(quick * settings().max_examples / QUICK_EXAMPLES)
    return settings(max_examples=max(1, number), **others)


def at_least(examples: int) -> Callable[[Any], Any]:
    """Fail a hypothesis test of which fewer than `examples` ran to their end: those that `assume`
    or `reject` leave out do not count. To be written above `settings` and `given`."""

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
            assert len(ended) >= examples, f"{len(ended)} examples ran to their end"

        return all_examples

    return decorate
