"""What cannot be is refused before any weight is read, in words that help."""

import json
import re
from pathlib import Path

import pytest
import tiny
import torch
from tiny import FAMILIES, SIZES, build, heads, inputs, stock_config, variant_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from hf_posenc import PosencBertModel
from hf_posenc.modeling.models.configuration_posenc import FLAGS
from hf_posenc.modeling.schemes.flags import Choice, Dictionary
from hf_posenc.modeling.schemes.table import SCHEMES


NAMES = ", ".join(FAMILIES)


@pytest.fixture
def stock_folder(tmp_path) -> Path:
    BertModel(stock_config()).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def no_weight_is_read(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("weights were about to be read")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(refuse))


def test_the_guard_against_reading_weights_works(stock_folder, no_weight_is_read):
    with pytest.raises(AssertionError, match="about to be read"):
        AutoModel.from_pretrained(stock_folder, position_scheme="t5")


def by_hand(config, flags: dict):
    for name, value in flags.items():
        setattr(config, name, value)
    return config


def with_entries(folder: Path, flags: dict) -> Path:
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | flags))
    return folder


ENTRY_POINTS = {
    "from_pretrained": lambda folder, flags: AutoModel.from_pretrained(folder, **flags),
    "from_pretrained of a class": lambda folder, flags: BertModel.from_pretrained(folder, **flags),
    "AutoConfig": lambda folder, flags: AutoConfig.from_pretrained(folder, **flags),
    "beside a config": lambda folder, flags: BertModel.from_pretrained(folder, config=stock_config(), **flags),
    "beside a variant's config": lambda folder, flags: BertModel.from_pretrained(
        folder, config=variant_config(position_scheme="absolute"), **flags
    ),
    "stock config": lambda folder, flags: BertConfig(**SIZES, **flags),
    "variant's config": lambda folder, flags: variant_config(**flags),
    "attribute": lambda folder, flags: AutoModel.from_config(by_hand(stock_config(), flags)),
    "attribute of a loaded config": lambda folder, flags: AutoModel.from_pretrained(
        folder, config=by_hand(AutoConfig.from_pretrained(folder), flags)
    ),
    "attribute of a variant's config": lambda folder, flags: AutoModel.from_config(by_hand(variant_config(), flags)),
    "config.json": lambda folder, flags: AutoModel.from_pretrained(with_entries(folder, flags)),
}
every_entry_point = pytest.mark.parametrize("entry_point", ENTRY_POINTS)

WRONG = {
    "unknown scheme": (
        {"position_scheme": "absolut+t5"},
        r"unknown scheme 'absolut'; did you mean 'absolute'\? Known: absolute, sinusoidal, .*joined by '\+'",
    ),
    "unknown scheme, near an alias": (
        {"position_scheme": "disentangle"},
        r"unknown scheme 'disentangle'; did you mean 'disentangled'\?",
    ),
    "unknown scheme, near nothing": ({"position_scheme": "xyzzy"}, r"unknown scheme 'xyzzy'\. Known: absolute"),
    "empty scheme": ({"position_scheme": "t5+"}, r"names of schemes joined by '\+', got 't5\+'"),
    "twice": ({"position_scheme": "t5+t5"}, r"position_scheme='t5\+t5' names t5 twice"),
    "twice by its alias": ({"position_scheme": "deberta+disentangled"}, "names deberta twice"),
    "two embedding-level schemes": (
        {"position_scheme": "absolute+sinusoidal"},
        r"2 embedding-level schemes \(absolute, sinusoidal\); at most one",
    ),
    "none and another": ({"position_scheme": "none+absolute"}, r"2 embedding-level schemes \(none, absolute\)"),
    "two tables of one name": (
        {"position_scheme": "relative_key+relative_key_query"},
        "cannot have both relative_key and relative_key_query: .*distance_embedding",
    ),
    "combine without an embedding-level scheme": (
        {"position_scheme": "t5", "position_combine": "gate"},
        r"position_combine='gate' has no use with position_scheme='t5': it belongs to absolute, sinusoidal",
    ),
    "combine without positions": (
        {"position_scheme": "none+t5", "position_combine": "gate"},
        r"position_combine='gate' has no use with position_scheme='none\+t5'",
    ),
    "misspelt": ({"postion_scheme": "t5"}, "unknown config option 'postion_scheme'; did you mean 'position_scheme'"),
    "shortened": ({"pos_scheme": "t5"}, "unknown config option 'pos_scheme'; did you mean 'position_scheme'"),
    "letters swapped": (
        {"posiiton_scheme": "t5"},
        "unknown config option 'posiiton_scheme'; did you mean 'position_scheme'",
    ),
    "letter missing": (
        {"position_bucket": 8},
        "unknown config option 'position_bucket'; did you mean 'position_buckets'",
    ),
    "plural": ({"position_schemes": "t5"}, "unknown config option 'position_schemes'; did you mean 'position_scheme'"),
}


# One of each kind: a value that no flag has, a flag that has no use, a flag that there is not.
KINDS = ("unknown scheme", "combine without an embedding-level scheme", "misspelt")


# Others are refused in the same places, at one entry point each, in turns.
@tiny.cross(
    case=WRONG,
    entry_point=ENTRY_POINTS,
    where=lambda case, entry_point: (
        case in KINDS or ([*WRONG].index(case) - [*ENTRY_POINTS].index(entry_point)) % len(ENTRY_POINTS) == 0
    ),
)
def test_wrong_flags_are_refused_at_every_entry_point(case, entry_point, stock_folder, no_weight_is_read):
    flags, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        ENTRY_POINTS[entry_point](stock_folder, flags)


@every_entry_point
def test_a_misspelt_flag_beside_a_right_one_is_refused(entry_point, stock_folder, no_weight_is_read):
    flags = {"position_scheme": "t5", "position_offset": 3}
    with pytest.raises(ValueError, match="unknown config option 'position_offset'; did you mean .*The options are"):
        ENTRY_POINTS[entry_point](stock_folder, flags)


# Of a number that no float holds, written out in no name of a test.
BEYOND_FLOATS = 10**400


TOO_LARGE = {
    "base": {"position_scheme": "rope", "position_base": BEYOND_FLOATS},
    "amplitude": {"position_scheme": "sinusoidal", "position_amplitude": BEYOND_FLOATS},
    "distance": {"position_scheme": "t5", "position_max_distance": BEYOND_FLOATS},
    "factor": {"position_scheme": "rope", "position_rope_scaling": {"rope_type": "linear", "factor": BEYOND_FLOATS}},
    "theta": {
        "position_scheme": "rope",
        "position_rope_scaling": {"rope_type": "default", "rope_theta": BEYOND_FLOATS},
    },
    "length": {
        "position_scheme": "rope",
        "position_rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": BEYOND_FLOATS,
        },
    },
}


@tiny.cross(number=TOO_LARGE, entry_point=ENTRY_POINTS, strength=1)
def test_numbers_that_no_float_holds_are_refused(number, entry_point, stock_folder, no_weight_is_read):
    flags = TOO_LARGE[number]
    with pytest.raises(ValueError, match=f"{[*flags][1]}.* (must be|is not usable)"):
        ENTRY_POINTS[entry_point](stock_folder, flags)


# A scheme to try each flag with, values out of range, values of a wrong type.
VALUES = {
    "position_scheme": (None, ["T5", "t5,rope", ""], [3, ["t5"], True, {"t5": 1}]),
    "position_combine": ("absolute", ["sum", "Gate", ""], [3, ["gate"], True]),
    "position_every_layer": ("absolute", [], ["true", 1, 0, [True]]),
    "position_init": ("t5", ["quiet", "Silent"], [0, True, ["silent"]]),
    "position_form": ("deberta", ["papers", ""], [1, False]),
    "position_base": ("rope", [1, 0, -10000.0, 1e31, float("nan"), float("inf")], ["10000", True, [1.0]]),
    "position_layout": ("rope", ["half", "interleave"], [2, ["halves"]]),
    "position_amplitude": ("sinusoidal", [-0.1, 1e39, float("nan"), float("inf")], ["1", True]),
    "position_frequency": ("sinusoidal", [0, -1.0, 4, float("nan"), float("inf")], ["1", True]),
    "position_rope_scaling": (
        "rope",
        [
            {"rope_type": "linearly", "factor": 2.0},
            {"rope_type": "linear"},
            {"rope_type": "linear", "factor": "two"},
            *({"rope_type": "yarn", "factor": 2.0, "attention_factor": number} for number in (0.0, float("nan"))),
        ],
        ["linear", 2.0, [2.0], True],
    ),
    "position_buckets": ("t5", [-1, 0, 2, 3, 7, 10**12], [8.0, "8", True, [8]]),
    "position_max_distance": ("t5", [0, -5, 8, 10**30, 2**20 + 1], [128.0, "128", True]),
    "position_stride": ("absolute", [0, -1, 10**30], [2.0, "2", True]),
    "position_per_layer": ("t5", [], ["yes", 1]),
    "position_on_values": ("relative", [], ["no", 0]),
    "position_attention_types": (
        "deberta",
        [[], ["p2p"], ["c2p", "c2p"], ["c2c"], ["c2p", "p2c", "p2p", "c2c"], ["C2P"]],
        ["c2p", 3, {"c2p": True}, True],
    ),
    "position_share_projections": ("deberta", [], ["true", 1]),
    "position_norm": ("deberta", [], ["true", 0]),
    "position_window": ("t5", [-1, 2**20 + 1], ["128", 128.5, True]),
    "position_global_every": ("t5", [-1, 2**20 + 1], ["3", 3.5, True]),
    "position_global_scheme": ("t5", ["t6", "absolute", ""], [3, ["t5"]]),
    "position_global_base": ("rope", [0, -1.0, float("nan"), float("inf")], ["100", True]),
}
for flag, owners in FLAGS.items():
    for scheme, own in owners.items():
        VALUES.setdefault(
            flag,
            (
                scheme,
                ["none of them"] if isinstance(own.kind, Choice) else [],
                [[1] if isinstance(own.kind, Dictionary) else {"a": 1}],
            ),
        )


def test_every_flag_is_tried():
    assert VALUES.keys() == FLAGS.keys()


@pytest.mark.parametrize("flag", VALUES)
def test_values_that_a_flag_cannot_have_are_refused_by_name(flag, stock_folder, no_weight_is_read):
    scheme, out_of_range, of_wrong_type = VALUES[flag]
    stock = (stock_folder / "config.json").read_text()
    for error, values in ((ValueError, out_of_range), (TypeError, of_wrong_type)):
        for index, value in enumerate(values):
            flags = {flag: value} if scheme is None else {"position_scheme": scheme, flag: value}
            # The first at every entry point, the others at that of all of them, and where files are read.
            for name in ENTRY_POINTS if index == 0 else ("stock config", "config.json"):
                if name == "config.json" and value != value:  # JSON has no NaN
                    continue
                (stock_folder / "config.json").write_text(stock)
                with pytest.raises((TypeError, ValueError), match=flag) as caught:
                    ENTRY_POINTS[name](stock_folder, flags)
                assert caught.type is error, (name, value)
                assert re.search(r"must|unknown scheme|is not usable|has no use", str(caught.value)), (name, value)


@pytest.mark.parametrize("scheme, flags, message", [
    ("t5", {"position_buckets": 8, "position_max_distance": 2}, "position_max_distance must be greater than 2"),
    ("deberta", {"position_buckets": 1}, "position_buckets must be 0 .no buckets. or at least 2 for deberta, got 1"),
    ("deberta", {"position_buckets": 8, "position_max_distance": 5}, "position_max_distance must be greater than"),
    ("deberta+tupe", {"position_form": "paper"}, "position_form='paper' is for deberta or tupe, not for both"),
    ("t5", {"position_global_every": 2}, "position_global_every=2 has no use without position_window"),
    ("absolute", {"position_combine": "gates"}, r"'attention' \(did you mean 'gate'\?\), got 'gates'"),
])  # fmt: skip
def test_flags_that_do_not_fit_each_other_are_refused(scheme, flags, message):
    with pytest.raises(ValueError, match=message):
        stock_config(position_scheme=scheme, **flags)


@pytest.mark.parametrize("scheme, sizes, message", [
    ("rope", {"hidden_size": 36, "num_attention_heads": 4}, "'rope' needs an even head size, got .* = 9"),
    ("absolute+rope", {"hidden_size": 36, "num_attention_heads": 4}, "'rope' needs an even head size, got .* = 9"),
    ("transformer_xl", {"hidden_size": 33, "num_attention_heads": 3}, "needs an even hidden_size, got 33"),
])  # fmt: skip
def test_sizes_that_a_scheme_cannot_work_with_are_refused(scheme, sizes, message, tmp_path, no_weight_is_read):
    stock = stock_config(**sizes)
    BertModel(stock).save_pretrained(tmp_path)
    for call in (
        lambda: stock_config(**sizes, position_scheme=scheme),
        lambda: AutoModel.from_pretrained(tmp_path, position_scheme=scheme),
        lambda: AutoModel.from_config(by_hand(stock, {"position_scheme": scheme})),
    ):
        with pytest.raises(ValueError, match=message):
            call()


class TestLongSequences:
    @tiny.cross(scheme=["absolute", "absolute+t5", "tupe"], family=FAMILIES, rest=pytest.mark.slow)
    def test_beyond_the_table_are_refused_with_the_schemes_that_go_further(self, scheme, family):
        model = build(scheme, family)
        first = model.config.first_position
        length = model.config.max_position_embeddings - first
        batch = inputs(length=length + 1, family=family, padding=None)
        model(**inputs(length=length, family=family, padding=None))
        calls = [
            lambda: model(**batch),
            lambda: model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"])),
            lambda: model(input_ids=batch["input_ids"], position_ids=torch.arange(length + 1)[None] + first),
            lambda: model(input_ids=batch["input_ids"][:, :2], position_ids=torch.tensor([[0, length + first]])),
        ]
        for call in calls:
            with pytest.raises(
                ValueError,
                match=f"{length + 1} tokens is longer than the position embedding matrix, .* {length} rows;",
            ) as error:
                call()
            assert all(
                name in str(error.value) for name in ("sinusoidal", "t5", "rope", "alibi", "relative", "deberta")
            )

    @tiny.cross(scheme=[name for name in SCHEMES if name not in ("absolute", "tupe")], family=FAMILIES, strength=1)
    def test_the_schemes_that_are_said_to_go_further_do(self, scheme, family):
        model = build(scheme, family)
        batch = inputs(length=2 * SIZES["max_position_embeddings"], family=family)
        assert model(**batch).last_hidden_state.isfinite().all()


class TestBackends:
    MESSAGE = "attn_implementation='flash_attention_2' does not support position_scheme='t5'; these do: sdpa, .*eager"

    def test_one_that_cannot_carry_a_scheme_is_refused_at_load(self, stock_folder, no_weight_is_read):
        flags = {"position_scheme": "absolute+t5", "attn_implementation": "flash_attention_2"}
        config = AutoConfig.from_pretrained(stock_folder, **flags)
        for call in (
            lambda: AutoModel.from_pretrained(stock_folder, **flags),
            lambda: BertModel.from_pretrained(stock_folder, **flags),
            lambda: AutoModel.from_config(config),
            lambda: BertModel(stock_config(**flags)),
            lambda: AutoModel.from_config(stock_config(position_scheme="t5"), attn_implementation="flash_attention_2"),
            lambda: BertForSequenceClassification.from_pretrained(stock_folder, **flags),
        ):
            with pytest.raises(ValueError, match=self.MESSAGE):
                call()

    @pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
    def test_and_when_set_later(self, head):
        model = build("t5", head=head)
        before = model.config._attn_implementation
        for implementation in ("flash_attention_2", {"": "flash_attention_2"}):
            with pytest.raises(ValueError, match=self.MESSAGE):
                model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == before
        with pytest.raises(ValueError, match="'kernels-community/flash-attn2' does not support position_scheme='t5'"):
            model.set_attn_implementation("kernels-community/flash-attn2")

    @torch.no_grad()
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_the_list_is_true(self, scheme):
        model = build(scheme)
        carries_any = scheme in ("absolute", "sinusoidal", "none", "rope")
        try:
            model.set_attn_implementation("flash_attention_2")
        except ImportError:  # transformers' own refusal: the scheme is fine, the package is missing
            assert carries_any
        except ValueError as error:
            assert not carries_any
            for implementation in str(error).split("these do: ")[1].split(", "):
                model.set_attn_implementation(implementation)
                assert model(**inputs()).last_hidden_state.isfinite().all()

    def test_a_name_that_nobody_knows_is_refused(self, stock_folder, no_weight_is_read):
        with pytest.raises(ValueError, match="sdpas"):
            AutoModel.from_pretrained(stock_folder, position_scheme="t5", attn_implementation="sdpas")


class TestOtherFamilies:
    SMALL = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    FAMILIES = f"is not supported .*the families that have position schemes are {NAMES}"

    def test_are_refused_with_the_list_of_those_that_are_supported(self, tmp_path, no_weight_is_read):
        GPT2LMHeadModel(GPT2Config(**self.SMALL)).save_pretrained(tmp_path)
        plain = GPT2Config(**self.SMALL)
        flags = {"position_scheme": "t5"}
        for call in (
            lambda: AutoModel.from_pretrained(tmp_path, **flags),
            lambda: AutoModelForCausalLM.from_pretrained(tmp_path, **flags),
            lambda: GPT2LMHeadModel.from_pretrained(tmp_path, **flags),
            lambda: AutoConfig.from_pretrained(tmp_path, **flags),
            lambda: GPT2Config.from_pretrained(tmp_path, **flags),
            lambda: AutoModelForCausalLM.from_pretrained(tmp_path, config=plain, **flags),
            lambda: GPT2LMHeadModel(GPT2Config(**self.SMALL, **flags)),
            lambda: AutoModelForCausalLM.from_config(GPT2Config(**self.SMALL, **flags)),
            lambda: AutoModelForCausalLM.from_config(by_hand(GPT2Config(**self.SMALL), flags)),
            lambda: AutoModel.from_pretrained(tmp_path, config=by_hand(GPT2Config(**self.SMALL), flags)),
        ):
            with pytest.raises(ValueError, match=self.FAMILIES):
                call()

    def test_are_left_alone_without_the_flag(self, tmp_path):
        GPT2LMHeadModel(GPT2Config(**self.SMALL)).save_pretrained(tmp_path)
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is GPT2LMHeadModel


class TestSubclassesOfOnesOwn:
    @pytest.mark.parametrize(
        "option", [{"position_scheme": "t5"}, {"position_window": 4}, {"position_every_layer": True}]
    )
    def test_of_a_stock_config_lose_no_option(self, option, tmp_path):
        own = type("OwnConfig", (BertConfig,), {})
        assert isinstance(BertModel(own(**SIZES, **option)), PosencBertModel)
        own(**SIZES).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"OwnConfig derives from BertConfig.*to give it {min(option)}"):
            own.from_pretrained(tmp_path, **option)
        assert type(BertModel(own(**SIZES))) is BertModel

    @pytest.mark.parametrize("family", FAMILIES)
    def test_of_a_stock_base_model_are_refused_with_the_class_to_derive_from(
        self, family, tmp_path, no_weight_is_read
    ):
        stock = next(cls for cls in heads(family) if cls.__name__.endswith("Model") and "LMHead" not in cls.__name__)
        own = type("OwnModel", (stock,), {})
        stock(stock_config(family)).save_pretrained(tmp_path)
        message = f"OwnModel derives from {stock.__name__}, .*derive it from Posenc{stock.__name__}"
        for call in (
            lambda: own.from_pretrained(tmp_path, position_scheme="t5"),
            lambda: own(stock_config(family, position_scheme="t5")),
            lambda: own(by_hand(stock_config(family), {"position_scheme": "t5"})),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        assert type(own(stock_config(family))) is own

    def test_of_a_variant_work(self):
        class OwnModel(PosencBertModel):
            pass

        model = OwnModel(stock_config(position_scheme="t5"))
        assert type(model) is OwnModel
        assert "encoder.relative_attention_bias.weight" in model.state_dict()


@pytest.mark.parametrize("config", [None, {}, "bert"])
@pytest.mark.parametrize("cls", [BertModel, PosencBertModel])
def test_what_is_no_config_is_refused(cls, config):
    with pytest.raises(TypeError, match="config"):
        cls(config)


@pytest.mark.parametrize("flags", [{"position_scheme": "t5"}, {"position_combine": "gate"}])
def test_a_truncated_stock_checkpoint_is_an_error_with_a_flag_too(flags, stock_folder):
    weights = stock_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Exception, match="(?i)incomplete|header|invalid"):
        AutoModel.from_pretrained(stock_folder, **flags)


def test_a_saved_scheme_of_a_newer_version_is_refused_by_name(tmp_path, no_weight_is_read):
    build("t5").save_pretrained(tmp_path)
    with_entries(tmp_path, {"position_scheme": "spiral"})
    with pytest.raises(ValueError, match="unknown scheme 'spiral'"):
        AutoModel.from_pretrained(tmp_path)
