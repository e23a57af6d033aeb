"""The architectures of Transformers that compute what some position schemes do, and what has to be done to the weights.

| scheme | architecture | weights |
|---|---|---|
| `t5`, `absolute+t5` | `mpnet` | token type 0 is added to the token embeddings; the position embedding matrix is zero, or moved to MPNet's rows |
| `deberta`, `absolute+deberta` | `deberta-v2` | in form `checkpoint` its √(1 + terms) goes to the query and to the projections of positions |
| `rope` | `jina_embeddings_v3` | in layout `interleaved` features of an attention head are reordered |

Each is a subclass of [`Architecture`]: what it cannot take (`refusal`), its config, and the change of the tensors in both directions.
Checked against the classes of Transformers 5.5.4 to 5.24, and of 4.57.6 where it has them.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import DebertaV2Config, JinaEmbeddingsV3Config, MPNetConfig, PreTrainedConfig

from ...modeling.attention.window import window_settings
from ...modeling.models.configuration_posenc import PositionConfigMixin
from ...modeling.schemes.deberta import Deberta
from ...modeling.schemes.flags import WINDOW
from ...modeling.schemes.rotary import LENGTH_DEPENDENT, Rope
from ...modeling.schemes.t5 import T5
from .names import (
    DEBERTA_TABLE,
    DEBERTA_V2,
    FREQUENCIES,
    JINA,
    KEY,
    MPNET,
    POSITION_KEY,
    POSITION_QUERY,
    QUERY,
    TABLE,
    TYPES,
    WORDS,
    Names,
    Tensors,
)


# Settings that the architectures have under BERT's names, as all have them.
COMMON = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps"),
)
# And those that all configs have, or none.
SHARED = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id", "problem_type", "classifier_dropout"),
    # What modules of sentence-transformers read, such as WeightedLayerPooling.
    "output_hidden_states",
    # What sentence-transformers' CrossEncoder applies to the logits, since version 4 and before.
    *("sentence_transformers", "sbert_ce_default_activation_function"),
)

# Of a learned frequency, which is 0 at the start.
SMALLEST_FREQUENCY = 1e-12


class Architecture:
    """An architecture of Transformers, as the target of a model with a position scheme.

    Attributes:
        config_class: its config.
        names: of its modules.
        scheme: the scheme inside the attention that it computes.
        with_table: whether it has learned position embeddings too.
            has_pooler, has_types: its base model has a pooler, and embeddings of token types.
        versions: of Transformers that have it, for people.
    """

    config_class: ClassVar[type[PreTrainedConfig]]
    names: ClassVar[Names]
    scheme: ClassVar[str]
    with_table: ClassVar[bool] = True
    has_pooler: ClassVar[bool] = True
    has_types: ClassVar[bool] = True
    # Entries of its config that say what it computes, and that the model with a scheme has for good.
    computed_by: ClassVar[tuple[str, ...]] = ("hidden_act", "layer_norm_eps", "num_attention_heads")
    versions: ClassVar[str]

    def __init__(self, source: PositionConfigMixin):
        self.source = source
        self.schemes = {name: scheme(source) for name, scheme in source.schemes.items() if name != "none"}

    @property
    def model_type(self) -> str:
        return self.config_class.model_type

    @property
    def reads_table(self) -> bool:
        return "absolute" in self.schemes

    @property
    def counts_from_left(self) -> bool:
        """Whether padding on the left moves its positions, where it does not move the model's."""
        return False

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting of the source, by BERT's name for it."""
        family = self.source.family
        if name in family.constants or hasattr(self.source, family.config_names.get(name, name)):
            return family.setting(self.source, name)
        return default

    def refusals(self) -> Iterator[str]:
        """What of the model it does not compute, and what would fit."""
        if self.source.sizes.is_decoder:
            yield "its tokens see later ones, which those of a decoder do not: is_decoder=False fits"
        if window_settings(self.source)[WINDOW.name]:
            yield "it has no local attention: position_window=0 fits"
        if self.reads_table:
            absolute = self.schemes["absolute"]
            for flag, plain in (("combine", "add"), ("every_layer", False), ("stride", 1)):
                if (value := getattr(absolute, flag)) != plain:
                    yield f"it only adds position embeddings once: position_{flag}={value!r} does not fit, {plain!r} does"
        if self.source.family.projection and self.source.embedding_size != self.source.hidden_size:
            yield (
                f"its token embeddings must be as wide as its layers, got embedding_size {self.source.embedding_size} and hidden_size "
                f"{self.source.hidden_size}"
            )

    def entries(self, head: str, max_length: int) -> dict[str, Any]:
        """The entries of its config."""
        found = {name: self.setting(name) for name in COMMON}
        found |= {name: getattr(self.source, name) for name in SHARED if hasattr(self.source, name)}
        return found | {"max_position_embeddings": max_length, "tie_word_embeddings": self.source.tie_word_embeddings}

    def entries_again(self, config: PreTrainedConfig) -> dict[str, Any]:
        """The entries that its config had, from the config of a model of this architecture; some of sizes, which are not compared, may differ."""
        return self.entries("Model", config.max_position_embeddings)

    def change(self, tensors: Tensors, max_length: int) -> None:
        """From a model with a scheme to this architecture, in place."""

    def change_back(self, tensors: Tensors, config: PreTrainedConfig) -> None:
        """From this architecture to the model with a scheme, in place.

        Args:
            config: of the model of this architecture.
        """


def _of_layers(name: str, tensors: Tensors) -> Iterator[str]:
    """The names of a tensor in all layers that have it."""
    before, _, after = name.partition("{}")
    yield from [
        key
        for key in tensors
        if key.startswith(before) and key.removesuffix(".weight").removesuffix(".bias").endswith(after)
    ]


def add_token_type(tensors: Tensors) -> None:
    """Token type 0 becomes part of the token embeddings; a decoder that is tied to these keeps what they were."""
    types = tensors.pop(f"{TYPES}.weight", None)
    if types is not None:
        tensors[f"{WORDS}.weight"] = tensors[f"{WORDS}.weight"] + types[0]


class MPNet(Architecture):
    """`t5` with one bias matrix of 32 buckets up to distance 128, alone or with learned position embeddings.

    MPNet has no token types. Its code has the numbers of buckets and 1 for padding, whatever the config says: with learned positions, token
    id 1 would be taken for padding.
    """

    config_class, names, scheme = MPNetConfig, MPNET, "t5"
    has_types = False
    versions = "4.57 and 5"

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        t5: T5 = self.schemes["t5"]
        if t5.per_layer:
            yield "it has one bias matrix for all layers: position_per_layer=False fits"
        if (t5.buckets, t5.max_distance) != (32, 128):
            yield (
                f"it has 32 buckets up to distance 128 in its code: position_buckets={t5.buckets} and position_max_distance="
                f"{t5.max_distance} do not fit"
            )
        follows = self.source.family.positions_follow_padding
        if self.reads_table and follows and self.source.pad_token_id != 1:
            yield f"it takes token id 1 for padding when it counts positions, but the model's pad_token_id is {self.source.pad_token_id}"

    def _moved_by(self) -> int:
        """How many rows further down its position embeddings begin."""
        return 0 if self.source.family.positions_follow_padding else 2

    def entries(self, head: str, max_length: int) -> dict[str, Any]:
        found = super().entries(head, max_length)
        found["max_position_embeddings"] = (
            self.source.max_position_embeddings + self._moved_by() if self.reads_table else max_length + 2
        )
        return found | {"relative_attention_num_buckets": 32}

    def change(self, tensors: Tensors, max_length: int) -> None:
        words = tensors[f"{WORDS}.weight"]
        add_token_type(tensors)
        if self.reads_table:
            table = tensors[f"{TABLE}.weight"]
            tensors[f"{TABLE}.weight"] = torch.cat([table.new_zeros(self._moved_by(), table.shape[1]), table])
        else:
            tensors[f"{TABLE}.weight"] = words.new_zeros(max_length + 2, words.shape[1])

    def change_back(self, tensors: Tensors, config: PreTrainedConfig) -> None:
        table = tensors.pop(f"{TABLE}.weight")
        if self.reads_table:
            tensors[f"{TABLE}.weight"] = table[self._moved_by() :]
        elif table.any():
            raise ValueError(
                "its position embeddings were zero, and were trained since: keep it as an MPNet, whose scheme is absolute+t5"
            )
        types = self.source.type_vocab_size if self.source.family.token_types else 0
        if types:  # they are in the token embeddings
            tensors[f"{TYPES}.weight"] = table.new_zeros(types, table.shape[1])


class DebertaV2(Architecture):
    """`deberta`, alone or with learned position embeddings.

    DeBERTa divides all of a score by √(d·(1 + terms)). In form `checkpoint` the model does not, so that √(1 + terms) goes to the query of the
    content term and to the projection that gives the positions' query. It has no pooler in the base model, and ignores
    `position_ids`.
    """

    config_class, names, scheme = DebertaV2Config, DEBERTA_V2, "deberta"
    has_pooler = False
    computed_by = (
        *Architecture.computed_by,
        *("pos_att_type", "position_buckets", "max_relative_positions", "share_att_key", "norm_rel_ebd"),
    )
    versions = "4.57 and 5"

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if "p2p" in self.deberta.attention_types:
            yield 'it has no p2p term: position_attention_types=("c2p", "p2c") fits'

    @property
    def deberta(self) -> Deberta:
        return self.schemes["deberta"]

    @property
    def counts_from_left(self) -> bool:
        return self.reads_table and self.source.family.positions_follow_padding

    @property
    def shares(self) -> bool:
        """Whether positions are projected by the content's own projections, biases included."""
        return self.deberta.form == "paper" and self.deberta.share_projections

    def entries(self, head: str, max_length: int) -> dict[str, Any]:
        found, deberta = super().entries(head, max_length), self.deberta
        dropout = found.pop("classifier_dropout", None)
        first = self.source.sizes.first_position
        if self.reads_table:
            found["max_position_embeddings"] = self.source.max_position_embeddings - first
        return found | {
            "type_vocab_size": self.setting("type_vocab_size", 0) if self.source.family.token_types else 0,
            "relative_attention": True,
            "pos_att_type": [*deberta.attention_types],
            "position_buckets": deberta.buckets or -1,
            "max_relative_positions": deberta.max_distance,
            "share_att_key": self.shares,
            "norm_rel_ebd": "layer_norm" if deberta.norm else "none",
            "position_biased_input": self.reads_table,
            "conv_kernel_size": 0,
            "legacy": True,
            "cls_dropout": found["hidden_dropout_prob"] if dropout is None else dropout,
        }

    def change(self, tensors: Tensors, max_length: int) -> None:
        if self.reads_table:
            tensors[f"{TABLE}.weight"] = tensors[f"{TABLE}.weight"][self.source.sizes.first_position :]
        if self.deberta.table_version == 1:  # rows that it does not read, and DeBERTa does
            table = tensors[f"{DEBERTA_TABLE}.weight"]
            rows = torch.arange(len(table), device=table.device).clamp(*self.deberta.reached_rows())
            tensors[f"{DEBERTA_TABLE}.weight"] = table[rows]
        if self.shares:
            return
        scale = math.sqrt(1 + len(self.deberta.attention_types)) if self.deberta.form == "checkpoint" else 1.0
        needed = {KEY: (POSITION_KEY, "c2p"), QUERY: (POSITION_QUERY, "p2c")}
        if self.deberta.share_projections:
            for content, (position, term) in needed.items():
                if term in self.deberta.attention_types:
                    self._project_alone(tensors, content, position)
        for name in (QUERY, POSITION_QUERY):
            for key in _of_layers(name, tensors):
                tensors[key] = tensors[key] * scale

    @staticmethod
    def _project_alone(tensors: Tensors, content: str, position: str) -> None:
        """Projections of positions with the content's weights and no bias."""
        for key in [*_of_layers(content, tensors)]:
            layer = key.split(".")[1]
            leaf = key.rpartition(".")[2]
            tensors[f"{position.format(layer)}.{leaf}"] = (
                tensors[key] if leaf == "weight" else torch.zeros_like(tensors[key])
            )

    def change_back(self, tensors: Tensors, config: PreTrainedConfig) -> None:
        if self.reads_table:  # rows before the first position are read by nothing but padding
            table = tensors[f"{TABLE}.weight"]
            before = table.new_zeros(self.source.sizes.first_position, table.shape[1])
            tensors[f"{TABLE}.weight"] = torch.cat([before, table])
        if self.shares:
            return
        scale = math.sqrt(1 + len(self.deberta.attention_types)) if self.deberta.form == "checkpoint" else 1.0
        for name in (QUERY, POSITION_QUERY):
            for key in _of_layers(name, tensors):
                tensors[key] = tensors[key] / scale
        if self.deberta.share_projections:
            for content, position in ((KEY, POSITION_KEY), (QUERY, POSITION_QUERY)):
                self._share(tensors, content, position)

    @staticmethod
    def _share(tensors: Tensors, content: str, position: str) -> None:
        """Take away projections of positions, which are the content's."""
        for key in [*_of_layers(position, tensors)]:
            layer, leaf = key.split(".")[1], key.rpartition(".")[2]
            value, expected = tensors.pop(key), tensors[f"{content.format(layer)}.{leaf}"]
            if leaf == "bias":
                expected = torch.zeros_like(value)
            if not torch.allclose(value, expected, rtol=1e-2 if value.dtype != torch.float32 else 1e-5, atol=1e-6):
                raise ValueError(
                    "its projections of positions have been trained apart from those of queries and keys, and the model shares "
                    "them (position_share_projections): go on with it as a DeBERTa"
                )


class JinaEmbeddingsV3(Architecture):
    """`rope`, with the scalings that do not change with the length of a text."""

    config_class, names, scheme = JinaEmbeddingsV3Config, JINA, "rope"
    with_table = False
    computed_by = (*Architecture.computed_by, "rope_parameters")
    versions = "5.4 and newer"

    @property
    def rope(self) -> Rope:
        return self.schemes["rope"]

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.rope.learn_frequencies == "layer":
            yield "all its layers rotate alike: position_learn_frequencies='layer' does not fit, 'shared' does"
        if self.rope.rotary_fraction != 1:
            yield f"it rotates all features: position_rotary_fraction={self.rope.rotary_fraction} does not fit, 1 does"
        if self.rope.rope_type in LENGTH_DEPENDENT:
            yield f"position_rope_scaling of type {self.rope.rope_type!r} depends on each text's length; linear, yarn and llama3 fit"

    def entries(self, head: str, max_length: int) -> dict[str, Any]:
        found = super().entries(head, max_length)
        parameters = {"rope_type": "default", **(self.rope.rope_scaling or {}), "rope_theta": float(self.rope.base)}
        parameters["rope_type"] = parameters.pop("type", parameters["rope_type"])
        if self.rope.learn_frequencies:  # frequencies divided by a number each are transformers' longrope
            factors = {"short_factor": self.factors, "long_factor": self.factors, "attention_factor": 1.0}
            parameters |= {"rope_type": "longrope", **factors, "original_max_position_embeddings": max_length}
        elif self.rope.rope_type != "default":
            parameters.setdefault("original_max_position_embeddings", self.rope.usable_positions)
        types = self.setting("type_vocab_size", 1) if self.source.family.token_types else 1
        return found | {"type_vocab_size": types, "rope_parameters": parameters}

    def entries_again(self, config: PreTrainedConfig) -> dict[str, Any]:
        parameters = config.rope_parameters
        self.factors = parameters.get("long_factor")  # learned frequencies are nowhere else
        return self.entries(
            "Model", parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        )

    def change(self, tensors: Tensors, max_length: int) -> None:
        words = tensors[f"{WORDS}.weight"]
        tensors.setdefault(f"{TYPES}.weight", words.new_zeros(1, words.shape[1]))
        if self.rope.learn_frequencies:
            frequencies = tensors.pop(f"{FREQUENCIES}.weight").double()
            # One of 0 is divided by a number that leaves no angle of any text.
            self.factors = frequencies.where(frequencies != 0, SMALLEST_FREQUENCY).reciprocal().tolist()
        if self.rope.layout == "interleaved":
            self._reorder(tensors, torch.arange(self.rope.head_dim).view(-1, 2).t().flatten())

    def change_back(self, tensors: Tensors, config: PreTrainedConfig) -> None:
        if self.source.family.token_types is None:
            add_token_type(tensors)
        if self.rope.learn_frequencies:
            factors = torch.tensor(config.rope_parameters["long_factor"], dtype=torch.float64)
            tensors[f"{FREQUENCIES}.weight"] = factors.reciprocal()
        if self.rope.layout == "interleaved":
            self._reorder(tensors, torch.arange(self.rope.head_dim).view(2, -1).t().flatten())

    def _reorder(self, tensors: Tensors, order: torch.Tensor) -> None:
        """The features of each head in another order, in queries and keys."""
        for name in (QUERY, KEY):
            for key in _of_layers(name, tensors):
                heads = tensors[key].unflatten(0, (-1, len(order)))
                tensors[key] = heads[:, order].flatten(0, 1)


ARCHITECTURES: tuple[type[Architecture], ...] = (MPNet, DebertaV2, JinaEmbeddingsV3)
