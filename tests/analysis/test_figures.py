"""Every figure, for every scheme and family: a record, a picture and a sentence, or one line that says why not."""

import importlib
import io
import json
import sys

import pytest
import reading
import tiny

from hf_posenc import analysis
from hf_posenc.modeling.schemes.base import AttentionScheme, PositionScheme
from hf_posenc.modeling.schemes.table import SCHEMES


# Figures that read documents with a tokenizer, and how little of them will do here.
READING = {"probes": {"length": 24, "windows": 30}, "order": {"length": 24}, "phase-shift": {"length": 24}}


def measured(figure: analysis.Figure, model):
    if figure.name in READING:
        return figure.measure(analysis.study(model, reading.tokenizer()), reading.documents(), **READING[figure.name])
    texts = tiny.inputs(family=analysis.study(model).family.model_type, padding=None, length=40)["input_ids"]
    return figure.measure(model, **{"texts": texts} if figure.name in ("terms", "distance") else {})


def check(figure: analysis.Figure, model, draw: bool = True) -> bool:
    """Whether the figure applies to the model, after everything that it gives was looked at."""
    try:
        data = measured(figure, model)
    except ValueError as error:
        assert "\n" not in str(error) and "position_scheme" in str(error)
        return False
    assert isinstance(data, analysis.Record) and data.model == type(model).__name__
    json.dumps(data.to_dict(), allow_nan=False)
    sentence = figure.describe(data)
    assert sentence.endswith(".") and "\n" not in sentence and "nan" not in sentence and data.model in sentence
    if not draw:
        return True
    from matplotlib import rcParams

    before = dict(rcParams)
    drawn = figure.plot(data)
    assert dict(rcParams) == before
    picture = io.BytesIO()
    drawn.savefig(picture, format="png", dpi=40)
    assert len(picture.getvalue()) > 2000
    return True


# Drawing takes most of the time; these have every form of data that there is.
DRAWN = ("sinusoidal", "deberta", "rope", "tupe+t5")


@tiny.cross(name=analysis.FIGURES, scheme=DRAWN, rest=pytest.mark.slow)
@pytest.mark.slow
def test_every_figure_is_drawn(name, scheme):
    assert check(analysis.FIGURES[name], tiny.build(scheme)) == where_they_apply(scheme)[name]


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(name, marks=() if name in ("none", "transformer_xl", "absolute+t5") else pytest.mark.slow)
        for name in [*SCHEMES, "absolute+t5"]
        if name not in DRAWN
    ],
)
@pytest.mark.slow
def test_every_figure_of_every_scheme(scheme):
    """Those that read documents read them in any scheme alike, and have tests of their own."""
    model = tiny.build(scheme)
    for name, expected in where_they_apply(scheme).items():
        if name not in READING:
            assert check(analysis.FIGURES[name], model, draw=False) == expected, name


def of_positions_alone(scheme: type[PositionScheme]) -> bool:
    """Whether a part of the score is, of an attention-level scheme."""
    if not issubclass(scheme, AttentionScheme):
        return False
    return scheme.name == "transformer_xl" or (scheme.reads_positions and not scheme.reads_content)


def where_they_apply(scheme: str) -> dict[str, bool]:
    """Figure -> whether it applies to a scheme."""
    has_vectors = any(part in ("absolute", "sinusoidal", "tupe") for part in scheme.split("+"))
    adds_vectors = "absolute" in scheme or "sinusoidal" in scheme
    expected = {
        "encoding": scheme != "none",
        "clock-hands": scheme in ("sinusoidal", "rope", "transformer_xl"),
        "similarity": has_vectors,
        "distance": True,
        "dimensions": has_vectors,
        "spaces": adds_vectors,
        "terms": True,
        **dict.fromkeys(READING, True),
        "table-properties": has_vectors,
        "attention-properties": True,
        "position-term": adds_vectors or any(of_positions_alone(SCHEMES[part]) for part in scheme.split("+")),
    }
    assert {*expected} == {*analysis.FIGURES}
    return expected


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES if name != "bert")]
)
@pytest.mark.slow
def test_every_figure_of_every_family(family):
    [head] = [cls for cls in tiny.heads(family) if cls.__name__.endswith("ForTokenClassification")]
    model = head(tiny.stock_config(family))
    applied = [name for name, figure in analysis.FIGURES.items() if check(figure, model, draw=family == "mpnet")]
    assert applied == [name for name in analysis.FIGURES if name != "clock-hands"]


@pytest.mark.parametrize(
    "name", [name for name, figure in analysis.FIGURES.items() if figure.needs == analysis.SCHEME]
)
def test_figures_of_a_scheme_by_its_name(name):
    scheme = "alibi" if name in ("distance", "encoding") else "sinusoidal"
    figure = analysis.figure_named(name)
    data = figure.measure(scheme)
    figure.plot(data)
    assert scheme.removesuffix("al") in figure.describe(data)


def test_an_unknown_figure_is_told_in_a_line():
    with pytest.raises(
        ValueError, match="there is no figure 'similarty'; the figures are encoding, clock-hands, similarity"
    ) as told:
        analysis.figure_named("similarty")
    assert "\n" not in str(told.value)


def test_numbers_that_json_cannot_hold_become_none():
    found = analysis.Properties(1.0, float("nan"), 3, float("inf"), 0.5, 1.0, None).to_dict()
    assert found["local_monotonicity"] is None and found["translation_invariance"] is None and found["reach"] == 3


def test_every_public_name_is_there():
    for figure in analysis.FIGURES.values():
        for function in (figure.measure, figure.plot, figure.describe):
            assert getattr(analysis, function.__name__) is function
    for name in analysis.__all__:
        assert hasattr(analysis, name)


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"^hf_posenc.analysis needs matplotlib: pip install .* -e \".\[analysis\]\"$"
    ):
        importlib.reload(analysis.style)
