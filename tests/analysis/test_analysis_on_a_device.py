"""Models on a device that is not the CPU are measured there, with the same findings."""

import math
from inspect import signature

import pretended
import pytest
import reading
import tiny

from hf_posenc.analysis import FIGURES, figure_named, study


pytestmark = pretended.needed


def close(found, expected, relative: float = 1e-3) -> bool:
    """Whether two records have the same entries and nearly the same numbers."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, float) and not math.isnan(expected):
        return math.isclose(found, expected, rel_tol=relative, abs_tol=1e-5)
    return found == expected or found != found


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("scheme", ["absolute", "sinusoidal+t5", "rope"])
def test_figures(scheme, name):
    measure = figure_named(name).measure
    options = {"texts": reading.documents(8, 140)} if "texts" in signature(measure).parameters else {}

    def measured(model):
        return measure(study(model, reading.tokenizer(), name=scheme), **options).to_dict()

    model = tiny.build(scheme)
    try:
        expected = measured(model)
    except ValueError as error:
        pytest.skip(str(error))
    with pretended.there():
        assert close(measured(model.to(pretended.DEVICE)), expected)
