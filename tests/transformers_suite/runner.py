"""A run of transformers' common tests over a family's stock classes, or over its variants with a scheme."""

import contextlib
import unittest
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch
from tiny import FAMILIES, STOCK_CONFIGS, heads
from transformers import initialization as init
from transformers import set_seed
from transformers.testing_utils import torch_device
from transformers_suite.loader import GenerationTesterMixin

from hf_posenc import variants
from hf_posenc.modeling.models.modeling_posenc import PosencPreTrainedModel


class ModelTester:
    """What the common tests ask for: a tiny config of a family, inputs for it, and their sizes."""

    is_training = True
    batch_size = 4
    seq_length = 7
    num_choices = 3
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    vocab_size = 99
    type_vocab_size = 5

    def __init__(self, config_class: type, flags: dict):
        self.config_class = config_class
        self.flags = flags
        # Of a stock config class, its variant's.
        self.family = variants.VARIANT_CONFIGS.get(config_class, config_class).family

    def get_config(self):
        types = {"type_vocab_size": self.type_vocab_size} if self.family.token_types else {}
        settings = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": 37,
            "max_position_embeddings": 64,
            # Weights so large that positions are felt in the outputs.
            "initializer_range": 0.2,
            **types,
        }
        names = self.family.config_names
        return self.config_class(**{names.get(name, name): value for name, value in settings.items()}, **self.flags)

    def prepare_config_and_inputs(self) -> tuple:
        shape = (self.batch_size, self.seq_length)
        attention_mask = torch.randint(0, 2, shape, device=torch_device)
        attention_mask[:, 0] = 1
        inputs = {
            "input_ids": torch.randint(0, self.vocab_size, shape, device=torch_device),
            "attention_mask": attention_mask,
        }
        if self.family.token_types:
            inputs["token_type_ids"] = torch.randint(0, self.type_vocab_size, shape, device=torch_device)
        return self.get_config(), inputs

    def prepare_config_and_inputs_for_common(self) -> tuple:
        return self.prepare_config_and_inputs()


class CommonTests:
    """What every run has beside the mixin of common tests."""

    family: str
    config_class: type
    flags: dict
    configuration: ModuleType
    # Asked of all families here; transformers asks it only of its own young ones.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        set_seed(0)
        self.model_tester = ModelTester(self.config_class, self.flags)

    def test_config(self):
        # 48 is no family's default, and goes with 12 heads.
        # By the config's own name: what is looked for in a saved config is no other.
        width = {self.model_tester.family.config_names.get("hidden_size", "hidden_size"): 48}
        self.configuration.ConfigTester(self, self.config_class, **width, **self.flags).run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class.__name__.endswith("ForPreTraining"):
            batch, length = self.model_tester.batch_size, self.model_tester.seq_length
            inputs["labels"] = torch.zeros(batch, length, dtype=torch.long, device=torch_device)
            if self.family == "bert":
                inputs["next_sentence_label"] = torch.zeros(batch, dtype=torch.long, device=torch_device)
        return inputs


class Outcomes(unittest.TestResult):
    """What became of every test and subtest of a run.

    Attributes:
        by_name: for each name, how often it "passed", "failed" or was "skipped: " for a reason. Variants go by the name
            of their stock class, so that runs can be compared.
        keys: all keys of the models' state dicts.
    """

    def __init__(self, classes: dict[type, type], keys: set[str]):
        super().__init__()
        self.by_name: dict[str, Counter] = defaultdict(Counter)
        self.keys = keys
        self._modules = {tested.__module__: stock.__module__ for stock, tested in classes.items()}

    def _in_stock_terms(self, text: str) -> str:
        for tested, stock in self._modules.items():
            text = text.replace(f"{tested}.", f"{stock}.")
        return text.replace("Posenc", "")

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        name = test.id().rpartition(f"{CommonTests.__name__}.")[2]
        self.by_name[self._in_stock_terms(name)][self._in_stock_terms(outcome)] += 1

    def addSuccess(self, test):
        self._note(test, "passed")

    def addSkip(self, test, reason):
        self._note(test, f"skipped: {reason}")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._note(test, "failed")

    def addError(self, test, error):
        super().addError(test, error)
        self._note(test, "failed")

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        self._note(subtest, "passed" if error is None else "failed")

    @property
    def failed(self) -> str:
        """Names and tracebacks of what failed, empty if nothing did."""
        return "\n\n".join(f"{test.id()}\n{traceback}" for test, traceback in self.failures + self.errors)

    def differences(self, stock: "Outcomes", passes_more: bool = False) -> list[str]:
        """What did not become of a test or subtest here what became of it in the run of the stock classes.

        With `passes_more`, only of what stock passed: the others may pass what stock skips, and skip it as well.

        Some subtests are named after a key of the state dict: those of a key that only one side has are left out.
        """
        own_keys = tuple(f"{start}{key}]" for key in self.keys ^ stock.keys for start in "[.")
        return [
            f"{name}: stock {dict(stock.by_name[name])}, variant {dict(self.by_name[name])}"
            for name in sorted({*stock.by_name, *self.by_name})
            if stock.by_name[name] != self.by_name[name]
            and not name.endswith(own_keys)
            and not (passes_more and "passed" not in stock.by_name[name])
        ]


@contextlib.contextmanager
def random_positions() -> Iterator[None]:
    """Variants initialise their position parameters at random: after a silent start many of these tests prove nothing.

    The random values are drawn where the initial ones were set, by a function that spares loaded weights, so the tests of
    initialisation mean what they meant.
    """
    initialise = PosencPreTrainedModel._init_weights

    @torch.no_grad()
    def initialise_randomly(self, module):
        initialise(self, module)
        for name in getattr(module, "position_initial", {}):
            init.normal_(getattr(module, name), std=0.5)

    with mock.patch.object(PosencPreTrainedModel, "_init_weights", initialise_randomly):
        yield


def run(modeling: ModuleType, configuration: ModuleType, family: str, flags: dict | None = None) -> Outcomes:
    """Run all common tests with every class of a family: the variants with `flags`, the stock classes without."""
    classes = {stock: variants.VARIANT_MODELS[stock] if flags else stock for stock in heads(family)}
    members = {
        "family": family,
        "configuration": configuration,
        "config_class": FAMILIES[family] if flags else STOCK_CONFIGS[family],
        "all_model_classes": tuple(classes.values()),
        "flags": flags or {},
    }
    generation = (GenerationTesterMixin,) if any(stock.can_generate() for stock in classes) else ()
    bases = (CommonTests, modeling.ModelTesterMixin, *generation, unittest.TestCase)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(type(CommonTests.__name__, bases, members))
    with random_positions():
        config = ModelTester(members["config_class"], members["flags"]).get_config()
        outcomes = Outcomes(classes, {key for tested in classes.values() for key in tested(config).state_dict()})
        tests.run(outcomes)
    return outcomes
