"""The lower envelope of many lines: ruling dominated lines out before sorting changes nothing."""

import numpy as np
import pytest

from oper.planner.lp import lower_envelope
from oper.planner.lp.lower_envelope import Envelope


@pytest.mark.parametrize("kind", ["any", "few values", "one intercept", "all on it"])
@pytest.mark.parametrize("scale", [1e-9, 1e3])
def test_lines_ruled_out_are_on_no_envelope(
    kind: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, lines = np.random.default_rng(7), 3000
    slope, intercept = scale * random.random(lines), random.random(lines)
    if kind == "few values":
        slope, intercept = np.floor(9 * slope / scale) * scale, np.floor(9 * intercept)
    elif kind == "one intercept":
        intercept = np.zeros(lines)
    elif kind == "all on it":
        steps = np.linspace(0, 1, lines)
        slope, intercept = scale / (0.01 + steps), steps**2
    found = Envelope.of(slope, intercept)
    monkeypatch.setattr(lower_envelope, "_MANY_LINES", lines + 1)
    expected = Envelope.of(slope, intercept)
    for name in ("line", "slope", "intercept", "until"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    density = np.geomspace(1e-3, 1e3, 50) / scale
    each = (slope * density[:, None] + intercept).min(axis=1)
    assert found.value(density) == pytest.approx(each)
