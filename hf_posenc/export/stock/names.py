"""What the modules of an architecture are called, by one set of names: the same tensors under other keys.

`{}` is the number of a layer. The names on the left are this package's own, and nothing is saved under them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch


# What positions and layers are made of.
WORDS, TABLE, TYPES = "words", "table", "types"
QUERY, KEY, VALUE = "layer.{}.query", "layer.{}.key", "layer.{}.value"
T5_TABLE = "t5"
DEBERTA_TABLE, DEBERTA_NORM = "deberta.table", "deberta.norm"
FREQUENCIES = "rope.frequencies"
POSITION_KEY, POSITION_QUERY = "layer.{}.position_key", "layer.{}.position_query"
POOLER = "pooler"
# Parameters of heads that their own layers have too, under another key.
TWICE = re.compile(r"^(?:cls\.predictions|lm_head)\.bias$")
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Head:
    """A head: where its modules are, and the activation between them (None where there is none, or where the config names it)."""

    modules: Mapping[str, str] = field(default_factory=dict)
    activation: str | None = None


@dataclass(frozen=True)
class Names:
    """The modules of an architecture.

    Attributes:
        prefix: what the names of its classes begin with.
        base: of a base model in a model with a head.
        modules: in the base model.
        heads: the end of a class's name -> its head. Modules that it does not name are the base model's.
    """

    prefix: str
    base: str
    modules: Mapping[str, str]
    heads: Mapping[str, Head]

    def of_class(self, name: str) -> dict[str, str]:
        """This package's name of each module -> its path in a class of this architecture."""
        head = name.removeprefix("Posenc").removeprefix(self.prefix)
        if head == "Model":
            return dict(self.modules)
        return {ours: f"{self.base}.{path}" for ours, path in self.modules.items()} | dict(self.heads[head].modules)


def _bert(**others: str) -> dict[str, str]:
    """BERT's names, with those that are others in an architecture, by the last part of this package's names."""
    names = {
        WORDS: "embeddings.word_embeddings",
        TABLE: "embeddings.position_embeddings",
        TYPES: "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        QUERY: "encoder.layer.{}.attention.self.query",
        KEY: "encoder.layer.{}.attention.self.key",
        VALUE: "encoder.layer.{}.attention.self.value",
        "layer.{}.attention_output": "encoder.layer.{}.attention.output.dense",
        "layer.{}.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
        "layer.{}.up": "encoder.layer.{}.intermediate.dense",
        "layer.{}.down": "encoder.layer.{}.output.dense",
        "layer.{}.down_norm": "encoder.layer.{}.output.LayerNorm",
        T5_TABLE: "encoder.relative_attention_bias",
        DEBERTA_TABLE: "encoder.rel_embeddings",
        DEBERTA_NORM: "encoder.LayerNorm",
        FREQUENCIES: "encoder.rotary_frequencies",
        POSITION_KEY: "encoder.layer.{}.attention.self.pos_key_proj",
        POSITION_QUERY: "encoder.layer.{}.attention.self.pos_query_proj",
        POOLER: "pooler.dense",
    }
    return names | {name: others[name.rpartition(".")[2]] for name in names if name.rpartition(".")[2] in others}


TAGS = Head({"head.out": "classifier"})
ANSWERS = Head({"head.out": "qa_outputs"})
OUT_OF_TWO = Head({"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}, "tanh")
LM_HEAD = Head(
    {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm", "head.decoder": "lm_head.decoder"}, "gelu"
)
ROBERTA_HEADS = {
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": OUT_OF_TWO,
    "ForTokenClassification": TAGS,
    "ForQuestionAnswering": ANSWERS,
    "ForMultipleChoice": Head({"head.dense": "roberta.pooler.dense", "head.out": "classifier"}, "tanh"),
}
BERT = Names(
    "Bert",
    "bert",
    _bert(),
    {
        "ForMaskedLM": Head(
            {
                "head.dense": "cls.predictions.transform.dense",
                "head.norm": "cls.predictions.transform.LayerNorm",
                "head.decoder": "cls.predictions.decoder",
            }
        ),
        "ForSequenceClassification": Head({"head.dense": "bert.pooler.dense", "head.out": "classifier"}, "tanh"),
        "ForTokenClassification": TAGS,
        "ForQuestionAnswering": ANSWERS,
        "ForMultipleChoice": Head({"head.dense": "bert.pooler.dense", "head.out": "classifier"}, "tanh"),
    },
)
ROBERTA = Names("Roberta", "roberta", _bert(), ROBERTA_HEADS)
ELECTRA = Names(
    "Electra",
    "electra",
    {name: path for name, path in _bert().items() if name != POOLER},
    {
        "ForMaskedLM": Head(
            {
                "head.dense": "generator_predictions.dense",
                "head.norm": "generator_predictions.LayerNorm",
                "head.decoder": "generator_lm_head",
            },
            "gelu",
        ),
        "ForSequenceClassification": replace(OUT_OF_TWO, activation="gelu"),
        "ForTokenClassification": TAGS,
        "ForQuestionAnswering": ANSWERS,
    },
)
DISTILBERT = Names(
    "DistilBert",
    "distilbert",
    {
        **{name: path for name, path in _bert().items() if name in (WORDS, TABLE, "embedding_norm")},
        QUERY: "transformer.layer.{}.attention.q_lin",
        KEY: "transformer.layer.{}.attention.k_lin",
        VALUE: "transformer.layer.{}.attention.v_lin",
        "layer.{}.attention_output": "transformer.layer.{}.attention.out_lin",
        "layer.{}.attention_norm": "transformer.layer.{}.sa_layer_norm",
        "layer.{}.up": "transformer.layer.{}.ffn.lin1",
        "layer.{}.down": "transformer.layer.{}.ffn.lin2",
        "layer.{}.down_norm": "transformer.layer.{}.output_layer_norm",
        T5_TABLE: "transformer.relative_attention_bias",
        DEBERTA_TABLE: "transformer.rel_embeddings",
        FREQUENCIES: "transformer.rotary_frequencies",
        DEBERTA_NORM: "transformer.LayerNorm",
        POSITION_KEY: "transformer.layer.{}.attention.pos_key_proj",
        POSITION_QUERY: "transformer.layer.{}.attention.pos_query_proj",
    },
    {
        "ForMaskedLM": Head(
            {"head.dense": "vocab_transform", "head.norm": "vocab_layer_norm", "head.decoder": "vocab_projector"}
        ),
        "ForSequenceClassification": Head({"head.dense": "pre_classifier", "head.out": "classifier"}, "relu"),
        "ForTokenClassification": TAGS,
        "ForQuestionAnswering": ANSWERS,
        "ForMultipleChoice": Head({"head.dense": "pre_classifier", "head.out": "classifier"}, "relu"),
    },
)
MPNET = Names(
    "MPNet",
    "mpnet",
    {
        name: path
        for name, path in _bert(
            query="encoder.layer.{}.attention.attn.q",
            key="encoder.layer.{}.attention.attn.k",
            value="encoder.layer.{}.attention.attn.v",
            attention_output="encoder.layer.{}.attention.attn.o",
            attention_norm="encoder.layer.{}.attention.LayerNorm",
            position_key="encoder.layer.{}.attention.attn.pos_key_proj",
            position_query="encoder.layer.{}.attention.attn.pos_query_proj",
        ).items()
        if name != TYPES
    },
    {
        "ForMaskedLM": LM_HEAD,
        "ForSequenceClassification": OUT_OF_TWO,
        "ForTokenClassification": TAGS,
        "ForQuestionAnswering": ANSWERS,
        "ForMultipleChoice": Head({"head.dense": "mpnet.pooler.dense", "head.out": "classifier"}, "tanh"),
    },
)
DEBERTA_V2 = Names(
    "DebertaV2",
    "deberta",
    {
        name: path
        for name, path in _bert(
            query="encoder.layer.{}.attention.self.query_proj",
            key="encoder.layer.{}.attention.self.key_proj",
            value="encoder.layer.{}.attention.self.value_proj",
        ).items()
        if name != POOLER
    },
    {
        "ForMaskedLM": BERT.heads["ForMaskedLM"],
        # The pooler's activation is what its config says.
        "ForSequenceClassification": Head({"head.dense": "pooler.dense", "head.out": "classifier"}),
        "ForTokenClassification": TAGS,
        "ForQuestionAnswering": ANSWERS,
        "ForMultipleChoice": Head({"head.dense": "pooler.dense", "head.out": "classifier"}),
    },
)
JINA = Names(
    "JinaEmbeddingsV3",
    "roberta",
    {
        name: path
        for name, path in _bert(
            query="layers.{}.self_attn.q_proj",
            key="layers.{}.self_attn.k_proj",
            value="layers.{}.self_attn.v_proj",
            attention_output="layers.{}.self_attn.o_proj",
            attention_norm="layers.{}.post_attention_layernorm",
            up="layers.{}.mlp.fc1",
            down="layers.{}.mlp.fc2",
            down_norm="layers.{}.post_mlp_layernorm",
        ).items()
        if name not in (TABLE, T5_TABLE, DEBERTA_TABLE, DEBERTA_NORM, POSITION_KEY, POSITION_QUERY, FREQUENCIES)
    },
    {
        "ForMaskedLM": LM_HEAD,
        "ForSequenceClassification": OUT_OF_TWO,
        "ForTokenClassification": TAGS,
        "ForQuestionAnswering": ANSWERS,
    },
)
# By the model type of the original config of a family.
FAMILIES: dict[str, Names] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": replace(ROBERTA, prefix="XLMRoberta"),
    "camembert": replace(ROBERTA, prefix="Camembert"),
    "electra": ELECTRA,
    "distilbert": DISTILBERT,
    "mpnet": MPNET,
}

Tensors = dict[str, torch.Tensor]


def read_tensors(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Tensors:
    """The tensors of a state dict by this package's names.

    Raises:
        ValueError: one belongs to no module that is known.
    """
    ours = {path: name for name, path in names.items()}
    found = {}
    for key, tensor in state.items():
        if TWICE.search(key):
            continue
        path, _, leaf = key.rpartition(".")
        name = ours.get(LAYER.sub("{}", path))
        if name is None:
            raise ValueError(f"{key} cannot be converted to another architecture")
        found[f"{name}.{leaf}".format(*LAYER.findall(path))] = tensor
    return found


def named_tensors(tensors: Tensors, names: Mapping[str, str], keys: Mapping[str, torch.Tensor]) -> Tensors:
    """The state dict with these keys, of tensors by this package's names.

    Raises:
        ValueError: a tensor has no key, or a key no tensor.
    """
    paths, found = dict(names), {}
    left = set(tensors)
    ours = {path: name for name, path in paths.items()}
    for key in keys:
        path, _, leaf = key.rpartition(".")
        if TWICE.search(key):  # the bias of the decoder, which has it twice
            name = "head.decoder.bias"
        else:
            name = f"{ours[LAYER.sub('{}', path)]}.{leaf}".format(*LAYER.findall(path))
        if name not in tensors:
            raise ValueError(f"there is no {name} for {key}")
        found[key] = tensors[name]
        left.discard(name)
    if left:
        raise ValueError(f"{', '.join(sorted(left))} would be lost")
    return found
