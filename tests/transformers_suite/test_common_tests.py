"""transformers' common tests of models and configs say of the variants what they say of the stock classes."""

import os

import pytest
import torch
import transformers
from tiny import FAMILIES, variant_class
from transformers import set_seed
from transformers.testing_utils import set_config_for_less_flaky_test
from transformers_suite.loader import FetchError, fetch, load, marks
from transformers_suite.runner import ModelTester, Outcomes, random_positions, run


pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def common_tests(request) -> tuple:
    """The two modules of common tests; what is downloaded for them stays in pytest's cache."""
    try:
        folder = fetch(transformers.__version__, request.config.cache.mkdir("transformers_common_tests"))
    except FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    for mark in marks(folder):
        request.config.addinivalue_line("markers", f"{mark}: of transformers' common tests")
    return load(folder)


@pytest.fixture(scope="class")
def stock(request, common_tests) -> Outcomes:
    """What becomes of the common tests with the stock classes of a family."""
    return run(*common_tests, request.cls.family)


def pytest_generate_tests(metafunc):
    if "scheme" in metafunc.fixturenames:
        metafunc.parametrize("scheme", metafunc.cls.schemes)


class Family:
    """One class of tests per family: pytest-xdist keeps it on one worker, where the stock classes run once."""

    family: str
    # The variants have backends that the stock classes lack.
    passes_more = False
    schemes: tuple[str, ...]

    def test_stock_classes_pass(self, stock):
        assert stock.by_name["test_save_load"] == {"passed": 1}
        assert not stock.failed, stock.failed

    def test_variants_pass_and_skip_what_the_stock_classes_do(self, common_tests, stock, scheme):
        variants = run(*common_tests, self.family, {"position_scheme": scheme})
        assert not variants.failed, variants.failed
        differences = variants.differences(stock, self.passes_more)
        assert not differences, "\n".join(differences)

    def test_the_runs_feel_positions(self):
        for scheme in self.schemes:
            # The same seed, the same inputs; the weights go over because schemes draw differently many numbers.
            model, inputs = self._model_and_inputs(scheme)
            without, _ = self._model_and_inputs("none")
            assert not without.load_state_dict(model.state_dict(), strict=False).missing_keys
            with torch.no_grad():
                difference = model(**inputs).last_hidden_state - without(**inputs).last_hidden_state
            assert difference.abs().max() > 1e-2, scheme

    def _model_and_inputs(self, scheme: str) -> tuple:
        set_seed(0)
        config, inputs = ModelTester(FAMILIES[self.family], {"position_scheme": scheme}).prepare_config_and_inputs()
        # The strictest of the common tests' comparisons, at a tolerance of 1e-6, is made with these settings.
        set_config_for_less_flaky_test(config)
        with random_positions():
            return variant_class(self.family)(config).eval(), inputs


# Each scheme below has parameters elsewhere: in the encoder, in every layer, with the embeddings; or none. XLM-R's and CamemBERT's
# classes are those of RoBERTa by another name.
class TestBert(Family):
    family = "bert"
    schemes = ("relative", "deberta")


class TestRoberta(Family):
    family = "roberta"
    schemes = ("t5",)


class TestElectra(Family):
    family = "electra"
    schemes = ("absolute+relative",)


class TestDistilBert(Family):
    family = "distilbert"
    schemes = ("rope",)


class TestMPNet(Family):
    family = "mpnet"
    passes_more = True
    schemes = ("absolute+t5",)
