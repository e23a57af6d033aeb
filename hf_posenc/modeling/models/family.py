"""What a family of models is: the names of its parts and sizes, and the positions its checkpoints were trained with.

All other code reads these descriptions, and knows no name of a family. A family is a file modeling_<family>.py with its description,
its config class and its models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Sizes:
    """What schemes read of a config, by one set of names (BERT's) for all families.

    Attributes:
        table_width: width of the word embeddings and of the table of absolute positions.
        first_position: position id of a sequence's first token.
    """

    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    initializer_range: float
    layer_norm_eps: float
    hidden_dropout_prob: float
    is_decoder: bool
    table_width: int
    first_position: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, eq=False)
class Family:
    """The description of a family. The defaults are BERT's names, which most families have.

    Attributes:
        model_type: of the original config.
        prefix: what the names of its original classes begin with; classes with a position scheme have "Posenc" before it.
        native_scheme: the `position_scheme` that its checkpoints were trained with.
        native_flags: the options of that scheme whose parameters the checkpoints have, which cannot have other values with them.
        native_keys: by scheme, the key of what else than the table of absolute positions they have.
        positions_follow_padding: positions count from padding_idx + 1, and padding has position padding_idx.
        heads: Auto class -> the end of the name of the class that it serves.
        config_names: names of sizes in [`Sizes`], and of settings of BERT's, that the config has under another name.
        constants: sizes that its config does not have.
        embeddings, encoder: in the base model.
        words, table, token_types: in the embeddings; the last is None if a family has none.
        projection: in the base model, between the embeddings and the encoder; None if they are of one width.
        layers: in the encoder.
        self_attention: in a layer, with dots.
        query, key, value: projections in the self-attention.
        output: the projection of the output, where it is part of the self-attention.
        attention_output: the same projection where it is not, in a layer, with dots.
        heads_count, head_dim: numbers in the self-attention.
        linear_layers: BERT's name of a linear layer, as PEFT knows it -> names of the layers that do its work.
    """

    model_type: str
    prefix: str
    heads: Mapping[str, str]
    native_scheme: str = "absolute"
    native_flags: Mapping[str, Any] = field(default_factory=dict)
    native_keys: Mapping[str, str] = field(default_factory=dict)
    positions_follow_padding: bool = False
    config_names: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    embeddings: str = "embeddings"
    encoder: str = "encoder"
    words: str = "word_embeddings"
    table: str = "position_embeddings"
    token_types: str | None = "token_type_embeddings"
    projection: str | None = None
    layers: str = "layer"
    self_attention: str = "attention.self"
    query: str = "query"
    key: str = "key"
    value: str = "value"
    output: str | None = None
    attention_output: str = "attention.output.dense"
    heads_count: str = "num_attention_heads"
    head_dim: str = "attention_head_size"
    linear_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def modeling_file(self) -> str:
        return f"modeling_{self.model_type.replace('-', '_')}.py"

    @property
    def auto_classes(self) -> dict[str, str]:
        """Auto class -> the class with a position scheme."""
        return {auto: f"Posenc{self.prefix}{head}" for auto, head in self.heads.items()}

    @property
    def table_key(self) -> str:
        """Key of the table of absolute positions in the base model's state dict."""
        return f"{self.embeddings}.{self.table}.weight"

    def setting(self, config, name: str) -> Any:
        """A setting of a config, by BERT's name for it."""
        return self.constants[name] if name in self.constants else getattr(config, self.config_names.get(name, name))

    def first_position(self, config) -> int:
        return self.setting(config, "pad_token_id") + 1 if self.positions_follow_padding else 0

    def sizes(self, config) -> Sizes:
        """Sizes of a config of the family, original or with a position scheme."""
        width = self.config_names.get("table_width", "hidden_size")
        derived = {"table_width": self.setting(config, width), "first_position": self.first_position(config)}
        names = [size.name for size in fields(Sizes) if size.name not in derived]
        return Sizes(**{name: self.setting(config, name) for name in names}, **derived)

    def embeddings_of(self, model: nn.Module) -> nn.Module:
        return getattr(model, self.embeddings)

    def encoder_of(self, model: nn.Module) -> nn.Module:
        return getattr(model, self.encoder)

    def layers_of(self, encoder: nn.Module) -> nn.ModuleList:
        return getattr(encoder, self.layers)

    def self_attention_of(self, layer: nn.Module) -> nn.Module:
        return layer.get_submodule(self.self_attention)

    def output_projection_of(self, layer: nn.Module) -> nn.Module:
        """What the heads' outputs, side by side, are projected with."""
        path = self.attention_output if self.output is None else f"{self.self_attention}.{self.output}"
        return layer.get_submodule(path)


def heads(**others: str | None) -> dict[str, str]:
    """The Auto classes that nearly all families serve, with a family's own; None for those that it does not."""
    heads = {
        "AutoModel": "Model",
        "AutoModelForMaskedLM": "ForMaskedLM",
        "AutoModelForCausalLM": "ForCausalLM",
        "AutoModelForSequenceClassification": "ForSequenceClassification",
        "AutoModelForTokenClassification": "ForTokenClassification",
        "AutoModelForMultipleChoice": "ForMultipleChoice",
        "AutoModelForQuestionAnswering": "ForQuestionAnswering",
        "AutoModelForTextEncoding": "Model",
        "AutoModelForPreTraining": "ForMaskedLM",
    }
    return {auto: head for auto, head in (heads | others).items() if head}
