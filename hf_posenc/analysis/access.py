"""A model under study: its parts by one set of names in all families, and what happens inside it on a text.

A model without a position scheme is converted to an equivalent model with one, so that every model has token embeddings, positions,
projections and score terms under the same names. The analysis works on a copy; the given model is not changed.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..change_scheme import change_scheme
from ..inspection import check_exists, checked_config
from ..inspection.weights import weights_of
from ..modeling.attention.backends import score_bias
from ..modeling.attention.window import window_settings
from ..modeling.models.configuration_posenc import flags_in_use
from ..modeling.models.embeddings import Add, Concat, SideBySide
from ..modeling.models.family import Family, Sizes
from ..modeling.models.self_attention import PositionSelfAttention
from ..modeling.schemes.flags import WINDOW
from ..modeling.schemes.parameters import without_bias
from ..modeling.schemes.table import scheme_names
from ..modeling.schemes.terms import Term
from ..parameters import position_parameters
from ..variants import VARIANT_CONFIGS, VARIANT_MODELS, family_of, scheme_of


# The config class with a position scheme of a family -> its base model.
BASE_MODELS = {cls.config_class: cls for cls in VARIANT_MODELS.values() if cls.position_classes.model is cls}


def chapters() -> list[str]:
    """The chapters of Python's language reference, in the order of their topics: real English that every Python carries."""
    from pydoc_data.topics import topics  # only here: half a megabyte

    return [text for _, text in sorted(topics.items())]


@dataclass
class LayerScores:
    """What the self-attention of one layer computed.

    The score before softmax is the sum of parts with these names:

    - `content`: query · key / √head_dim, before any rotation;
    - `rotation`: what the rotation of `rope` changes in it;
    - `u`: what the first bias of Transformer-XL adds (u · key);
    - `c2p`: queries times relative position embeddings;
    - `p2c`: keys times relative position embeddings;
    - `v`: the second bias of Transformer-XL times relative position embeddings;
    - `bias`: a bias for each distance or pair of positions;
    - `p2p`: products of positions;
    - `sums`, or `left` and `right`: differences of running sums over tokens.

    If the model has several schemes inside the attention, the names of all but the first two begin with the scheme's name: `t5 bias`.

    Attributes:
        hidden: (batch, length, hidden_size), the layer's input.
        query: (batch, heads, length, head_dim), as projected, before any rotation.
        key: (batch, heads, length, head_dim), as projected, before any rotation.
        parts: the parts of the score by name, each (batch or 1, heads or 1, query, key).
        terms: the score terms that the parts are computed from, by the same names.
        weights: (batch, heads, query, key), the attention weights after softmax.
    """

    hidden: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    parts: dict[str, torch.Tensor]
    terms: dict[str, Term]
    weights: torch.Tensor

    @property
    def scores(self) -> torch.Tensor:
        """The score before softmax, (batch, heads, query, key): the sum of the parts."""
        return sum(self.parts.values())


@dataclass
class Observation:
    """The hidden states and attention scores of a model for one batch of sequences.

    Attributes:
        input_ids: (batch, length), without padding.
        hidden_states: layers + 1 tensors (batch, length, hidden_size): the input of the encoder, then the output of each layer.
        layers: the scores of the layers that were requested, by the layer's number from 0.
    """

    input_ids: torch.Tensor
    hidden_states: list[torch.Tensor]
    layers: dict[int, LayerScores]


@dataclass(frozen=True)
class Subject:
    """A model that is analyzed. [`study`] makes it.

    Attributes:
        name: the name in headings.
        model: a copy of the base model with a position scheme: float32, on the CPU, in eval mode, with eager attention.
        tokenizer: the tokenizer, or None.
        trained: False if the model was made from the name of a scheme, and has initial parameters.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    trained: bool = True

    @property
    def family(self) -> Family:
        return self.model.position_classes.family

    @property
    def sizes(self) -> Sizes:
        return self.model.config.sizes

    @property
    def scheme(self) -> str:
        """The `position_scheme`. If the model was given without one, that of its family."""
        return self.model.config.position_scheme

    @property
    def embeddings(self) -> nn.Module:
        return self.family.embeddings_of(self.model)

    @property
    def encoder(self) -> nn.Module:
        return self.family.encoder_of(self.model)

    @property
    def layers(self) -> nn.ModuleList:
        return self.family.layers_of(self.encoder)

    @property
    def attentions(self) -> list[PositionSelfAttention]:
        """The self-attention of each layer."""
        return [self.family.self_attention_of(layer) for layer in self.layers]

    @property
    def longest(self) -> int | None:
        """The number of tokens that the position embedding matrix has rows for; None if no matrix limits it."""
        ends = any(scheme.ends_with_table for scheme in self.model.config.schemes.values())
        return self.embeddings.table_length() if ends else None

    @property
    def word_vectors(self) -> torch.Tensor:
        """The token embedding matrix, (vocabulary, width)."""
        return self.embeddings.words.weight.detach()

    @property
    def has_vectors(self) -> bool:
        """True if positions have vectors: added to the token embeddings, or in a position embedding matrix that the attention reads."""
        return self.embeddings.position_scheme is not None or self.embeddings.has_table

    @torch.no_grad()
    def position_vectors(self, length: int | None = None) -> torch.Tensor:
        """The vectors of the first positions: rows of the position embedding matrix, or sinusoids with their amplitude.

        Args:
            length: number of positions. Default: all rows of the matrix, or for sinusoids the number of positions in the config.

        Returns:
            (length, width).

        Raises:
            ValueError: the model has no position vectors, or fewer than `length`.
        """
        if not self.has_vectors:
            raise ValueError(
                f"{self.name} has no absolute position vectors: position_scheme is {self.scheme!r}, and only "
                "'absolute', 'sinusoidal' and 'tupe' have them"
            )
        longest = self.longest
        if longest is not None and length is not None and length > longest:
            raise ValueError(f"{self.name} has {longest} positions, got length={length}")
        if length is None:
            length = longest or self.sizes.max_position_embeddings - self.sizes.first_position
        embeddings, slots = self.embeddings, torch.arange(length)[None]
        if embeddings.position_scheme is None:  # a table that the attention alone reads
            return embeddings.table(slots + embeddings.first_position)[0]
        return embeddings.position_vectors(None, length, 0, slots.device)[0]

    @torch.no_grad()
    def vectors_in_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The position vectors that the tokens of a text get, at strided positions with `position_stride`.

        Args:
            input_ids: (batch, length), without padding.

        Returns:
            (batch or 1, length, width).
        """
        embeddings, (_, length), device = self.embeddings, input_ids.shape, input_ids.device
        position_ids = None
        if embeddings.position_scheme.uses_table:
            position_ids = embeddings.table_position_ids(input_ids, None, embeddings.slots(length, 0, device))
        return embeddings.position_vectors(position_ids, length, 0, device)

    @torch.no_grad()
    def added_positions(self, length: int | None = None) -> torch.Tensor:
        """What the first positions add to the token embeddings. With `position_combine="add"`, these are the [`position_vectors`].

        Args:
            length: number of positions. Default: as for [`position_vectors`].

        Returns:
            (length, width).

        Raises:
            ValueError: the model adds no positions to its token embeddings, or combines them by something else than a sum.
        """
        scheme = self.embeddings.position_scheme
        if scheme is None:
            raise ValueError(
                f"{self.name} adds no positions to its token embeddings: position_scheme is {self.scheme!r}; 'absolute' and 'sinusoidal' add them"
            )
        return self.added(self.position_vectors(length))

    def added(self, vectors: torch.Tensor) -> torch.Tensor:
        """What position vectors (..., width) add to the token embeddings. Raises as [`combine`]."""
        nothing = torch.zeros_like(vectors)
        return self.combine(nothing, vectors) - self.combine(nothing, nothing)

    def combine(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Combine token embeddings and positions as the model does.

        Args:
            words: token embeddings, (..., width).
            positions: position vectors, (..., width).

        Returns:
            (..., width).

        Raises:
            ValueError: `position_combine` is neither "add" nor "concat".
        """
        combination = self.embeddings.position_combine
        if type(combination) not in (Add, Concat, SideBySide):
            raise ValueError(
                f"{self.name}: with position_combine={self.embeddings.position_scheme.combine!r} token embeddings and positions are not summed; "
                "with 'add' and 'concat' they are"
            )
        return combination.combine(self.embeddings, words, positions)

    def check_trained(self, what: str) -> None:
        """Raise ValueError if the model was made from the name of a scheme. `what` says in the message what needs a checkpoint."""
        if not self.trained:
            raise ValueError(f"{what} needs a checkpoint, got the name of a scheme, {self.scheme!r}")

    def into_attention(self, vectors: torch.Tensor) -> torch.Tensor:
        """Apply the linear part of the embeddings' LayerNorm to directions.

        It subtracts the mean over features and multiplies by the weight; in ELECTRA it then applies the projection. It leaves out the division
        by the standard deviation, which differs between tokens, and biases.

        Args:
            vectors: (..., width).

        Returns:
            (..., hidden_size).
        """
        directions = (vectors - vectors.mean(-1, keepdim=True)) * self.embeddings.LayerNorm.weight
        projection = self.projection
        return directions if projection is None else without_bias(projection, directions)

    @property
    def projection(self) -> nn.Module | None:
        """The linear layer between embeddings and encoder (ELECTRA). None if they have the same width."""
        return getattr(self.model, self.family.projection or "", None)

    def batches(
        self, texts: Iterable[str] | torch.Tensor | None = None, length: int = 128, count: int = 16
    ) -> list[torch.Tensor]:
        """Tokenize texts, in batches of texts of the same length, so that nothing is padded.

        Args:
            texts: strings, or token ids (batch, length), which are used unchanged. Default: chapters of the Python language reference.
            length: number of tokens to which a text is truncated, special tokens counted.
            count: number of chapters, if `texts` is not given.

        Returns:
            Token ids, int64 (batch, length) each, with special tokens.

        Raises:
            ValueError: a text is empty, or there is no tokenizer to read it.
        """
        if isinstance(texts, torch.Tensor):
            if texts.dim() != 2 or texts.dtype != torch.long or not texts.numel():
                raise ValueError(
                    f"token ids must be int64 (batch, length), got {texts.dtype} of shape {tuple(texts.shape)}"
                )
            return [texts]
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer to read a text with: pass one with tokenizer=")
        length = min(length, self.longest or length)
        if texts is None:
            ids = [self._tokenize(text, length) for text in chapters()]
            ids = [row for row in ids if len(row) == length][:count]
        else:
            ids = [self._tokenize(text, length) for text in ([texts] if isinstance(texts, str) else texts)]
        if not ids:
            raise ValueError("no text was given: pass at least one")
        groups: dict[int, list[list[int]]] = {}
        for row in ids:
            groups.setdefault(len(row), []).append(row)
        return [torch.tensor(rows) for rows in groups.values()]

    def any_ids(self, length: int) -> torch.Tensor:
        """Token ids (1, length), all the same and not padding: for measurements that do not depend on tokens."""
        length = min(length, self.longest or length)
        return torch.full((1, length), 1 if self.model.config.pad_token_id == 0 else 0)

    def _tokenize(self, text: str, length: int) -> list[int]:
        special = self.tokenizer.num_special_tokens_to_add()
        if length <= special:
            raise ValueError(f"length must be more than the {special} special tokens, got {length}")
        if not isinstance(text, str):
            raise TypeError(f"a text must be a string, got {text!r} of type {type(text).__name__}")
        ids = self.tokenizer(text, truncation=True, max_length=length)["input_ids"]
        if len(ids) <= special or not text.strip():
            raise ValueError(f"the text {text!r} is empty: it contains no words")
        return ids

    @torch.no_grad()
    def observe(
        self, input_ids: torch.Tensor, layers: Iterable[int] = (), until: int | None = None, **inputs
    ) -> Observation:
        """Run the model.

        Args:
            input_ids: (batch, length), without padding.
            layers: numbers, from 0, of the layers whose queries, keys, scores and weights are returned.
            until: number of layers to run. Default: all.
            inputs: further arguments of the model, such as `position_ids`.
        """
        hidden_states: list[torch.Tensor] = []
        seen: dict[int, LayerScores] = {}

        def entered(module, given, keywords):
            hidden_states.append(given[0] if given else keywords["hidden_states"])

        def left(module, given, output):
            hidden_states.append(output if isinstance(output, torch.Tensor) else output[0])
            if len(hidden_states) - 1 == until:
                raise _Enough

        def attended(number, module, given, keywords, output):
            seen[number] = _layer_scores(module, given[0], keywords.get("position_state"), output[1])

        handles = [self.encoder.register_forward_pre_hook(entered, with_kwargs=True)]
        handles += [layer.register_forward_hook(left) for layer in self.layers]
        for number in layers:
            handles.append(self.attentions[number].register_forward_hook(partial(attended, number), with_kwargs=True))
        try:
            self.model(input_ids=input_ids, **inputs)
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return Observation(input_ids, hidden_states, seen)


class _Enough(Exception):
    """The layers that are wanted have run."""


def score_parts(
    attention: PositionSelfAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    position_state: dict | None,
    hidden: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], dict[str, Term]]:
    """The score of a self-attention before softmax as a sum of parts, each (batch or 1, heads, query, key).

    Args:
        query, key: (batch, heads, length, head_dim), as projected.
        position_state: what the encoder hands to its self-attentions.
        hidden: (batch, length, hidden_size), that they were projected from.

    Returns:
        The parts by the names of [`LayerScores`], and the terms of which all but content, rotation and u come.
    """
    projected = query, key
    query, key, contexts = attention.rotate(query, key, None, position_state, hidden)

    def content(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return queries @ keys.transpose(-1, -2) * attention.scaling

    parts, terms = {"content": content(*projected)}, {}
    if query is not projected[0]:
        parts["rotation"] = content(query, key) - parts["content"]
    several = len(attention.position_schemes) > 1
    asking = query
    for scheme, content_query, own_terms in attention.terms_by_scheme(query, key, contexts):
        prefix = f"{scheme.name} " if several else ""
        if content_query is not asking:
            parts[f"{prefix}u"] = content(content_query - asking, key)
        asking = content_query
        terms |= {prefix + name: piece for term in own_terms for name, piece in term.pieces()}
    parts |= {name: score_bias(query, key, [term]) for name, term in terms.items()}
    return parts, terms


def _layer_scores(
    attention: PositionSelfAttention, hidden: torch.Tensor, position_state: dict | None, weights: torch.Tensor
) -> LayerScores:
    query, key = heads_of(attention, hidden)
    parts, terms = score_parts(attention, query, key, position_state, hidden)
    return LayerScores(hidden, query, key, parts, terms, weights)


def heads_of(
    attention: PositionSelfAttention, hidden: torch.Tensor, biases: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (batch, heads, length, head_dim) of hidden states (batch, length, hidden_size), or their linear part alone."""
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    projections = attention.query_projection, attention.key_projection
    projected = [projection(hidden) if biases else without_bias(projection, hidden) for projection in projections]
    query, key = (states.view(shape).transpose(1, 2) for states in projected)
    return query, key


def check_varied(name: str, vectors: torch.Tensor) -> None:
    """Raise ValueError where all position vectors (positions, width) are one, as those of a table that starts at zero."""
    if len(vectors) < 2 or torch.equal(vectors, vectors[:1].expand_as(vectors)):
        raise ValueError(
            f"the {len(vectors)} position vectors of {name} are all equal, so there is nothing to compare"
        )


def study(
    model: "str | Path | PreTrainedModel | Subject",
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
) -> Subject:
    """Prepare a model for analysis.

    Args:
        model: a folder, a name on the Hub, or a model of a supported family, with or without a position scheme or a task head; or the name of
            a scheme ("alibi"), for a small untrained model with the published initialization.
        tokenizer: the tokenizer. Default: the one saved with the model.
        name: a name for headings. Default: the last part of the model's path or name.

    Raises:
        OSError: there is no such model.
        TypeError: `model` is not a model of Transformers.
        ValueError: the model's family is not supported, or the model is a decoder or has local attention.
    """
    if isinstance(model, Subject):
        return replace(model, tokenizer=tokenizer or model.tokenizer, name=name or model.name)
    if isinstance(model, str | Path):
        if not Path(model).exists() and _is_scheme(str(model)):
            return study(of_scheme(str(model)), tokenizer, name)
        place = str(model)
        check_exists(place)
        checked_config(place)  # what it does not bear is said in a line
        with weights_of(place):
            model = AutoModel.from_pretrained(place)
    else:
        place = getattr(getattr(model, "config", None), "name_or_path", "")
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise TypeError(
            f"expected a model of Transformers or its name, got {kind}; for a PEFT model, pass merge_and_unload()"
        )
    if tokenizer is None and place:
        tokenizer = _tokenizer_beside(place)
    return Subject(name or Path(place).name or type(model).__name__, _as_variant(model.base_model), tokenizer)


def _is_scheme(name: str) -> bool:
    try:
        return bool(scheme_names(name))
    except ValueError:
        return False


def of_scheme(name: str, **flags) -> Subject:
    """Make a small untrained BERT with a scheme, whose position parameters have the published initialization.

    Args:
        name: a `position_scheme`.
        flags: other config options.
    """
    [config_class] = [cls for cls in VARIANT_CONFIGS.values() if cls.stock_model_type == "bert"]
    settings = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    settings |= {"vocab_size": 8, "position_scheme": name, **flags}
    published = {"position_init": "paper"} if "position_init" in flags_in_use(name) else {}
    try:
        config = config_class(**{**published, **settings})
    except ValueError:  # where it has no use without another option (rope), or one that is given is wrong
        config = config_class(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BASE_MODELS[config_class]._from_config(config, attn_implementation="eager")
    learned = model.embeddings.has_table or any(
        parameter.numel() > 1 for parameter in position_parameters(model).values()
    )
    return Subject(f"untrained {name}" if learned else name, model.eval(), trained=False)


def _tokenizer_beside(place: str) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError):
        return None


def _as_variant(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a base model with a position scheme that computes the same: float32, on the CPU, in eval mode, with eager attention."""
    if family_of(model.config).setting(model.config, "is_decoder"):
        raise ValueError(
            "this model is a decoder, whose tokens attend to earlier tokens only; only encoders can be analyzed"
        )
    if width := window_settings(model.config)[WINDOW.name]:
        raise ValueError(
            f"this model has {WINDOW.name}={width}; only models that attend to all tokens in every layer can be analyzed"
        )
    model = copy.deepcopy(model).to("cpu", torch.float32)
    model = change_scheme(model, scheme_of(model.config), reports=False).eval()
    model.set_attn_implementation("eager")
    return model
