"""Selection of a parametrised test's cases for `make test`."""

from collections.abc import Sequence


def repeated(cases: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each case whether earlier cases had all of its parameter values.

    A case is the ids of its values, one per parametrisation, so that a test of 5 × 3 cases keeps
    at least 5 of them and each value of each parameter.
    """
    seen: set[tuple[int, str]] = set()
    found = []
    for case in cases:
        values = set(enumerate(case))
        found.append(bool(values) and values <= seen)
        seen |= values
    return found
