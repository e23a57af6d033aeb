"""Start: what algebra alone keeps of the positions that a checkpoint was trained with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..modeling.models.configuration_posenc import PositionConfigMixin
from ..modeling.models.embeddings import Concat
from ..modeling.models.family import Family
from ..modeling.schemes.base import AttentionScheme, PositionScheme
from ..modeling.schemes.sinusoidal import precise_dtype, sinusoids
from ..modeling.schemes.table import SCHEMES, scheme_names
from ..variants import family_of, scheme_of
from .checkpoints import check_installed, keeps_scheme
from .observation import SMALLEST_WEIGHT, Batch, LayerByLayer, observe, undisturbed


# What bases and frequencies of sinusoids are chosen among.
BASES = (10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)
FREQUENCIES = (1.0, 1.5, 2.0)
# How much a row of the table counts that lies beyond the training length, relative to one within.
BEYOND = 1e-2
# By which part of themselves the products of a fitted matrix may be off: what bfloat16 rounds away. Slow sinusoids are nearly
# collinear, and without noise in the bargain their weights are huge and cancel each other.
NOISE = torch.finfo(torch.bfloat16).eps
# Relative size of what keeps other problems solvable.
RIDGE = 1e-6
# Random tokens that stand for a text where none is given: sequences and their length.
RANDOM_TEXT = (16, 64)


@dataclass(frozen=True)
class Aims:
    """What a conversion is to lead to, for `conversion_options` of a scheme.

    Attributes:
        given: config options, those that the caller gives and those that schemes before have chosen.
        schemes: that the model is to have, by name.
        trained_length, max_length: tokens that the teacher reads well, and that the student is to read.
        teacher: None before weights are loaded.
    """

    given: Mapping[str, Any]
    schemes: Mapping[str, type[PositionScheme]]
    trained_length: int
    max_length: int
    teacher: nn.Module | None = None

    @torch.no_grad()
    def best_sinusoids(self, layout: str) -> dict[str, float]:
        """[`best_sinusoids`] for what is added to the teacher's token embeddings; nothing where that is nothing, or not known yet."""
        if self.teacher is None:
            return {}
        family = family_of(self.teacher.config)
        rows = joined_positions(self.teacher, family, number_of_positions(self.teacher, family))
        return best_sinusoids(rows, self.trained_length, layout) if rows.any() else {}


@dataclass(frozen=True)
class Start:
    """What `initialize_from` of a scheme is given: a student with the scheme, its teacher, text, and what can be done with them.

    Attributes:
        student, teacher: in eval mode; the student's parameters are what is set.
        family: of both.
        rows: (positions, width), what is added to the teacher's token embeddings at each position.
        trained_length: of these, how many the teacher knows well.
        text: `input_ids` and `attention_mask`, batch by batch.
        is_random: the text is of random tokens: none was given.
    """

    student: nn.Module
    teacher: nn.Module
    family: Family
    rows: torch.Tensor
    trained_length: int
    text: list[Batch]
    is_random: bool = False

    @property
    def adds_rows(self) -> bool:
        """Whether rows of the student's position embedding matrix are added to its token embeddings."""
        return add_rows(schemes_of(self.student))

    @property
    def kept(self) -> set[str]:
        """The names of those that the teacher has too."""
        return kept_schemes(self.student, self.teacher)

    @property
    def encoder(self) -> nn.Module:
        """The student's encoder."""
        return self.family.encoder_of(self.student.base_model)

    @property
    def heads_are_free(self) -> bool:
        """Whether attention heads may change their order."""
        return heads_are_free(self.student, self.teacher)

    @property
    def bases_are_free(self) -> bool:
        """Whether queries and keys of a head may have another basis: no scheme that is kept reads them."""
        return not any(scheme.reads_content for scheme in of_the_attention(self.kept))

    def fold_mean(self) -> None:
        """Add the mean row to all token embeddings, and to that with which all texts begin ([CLS]) the first row instead."""
        mean = self.rows[: self.trained_length].mean(0)
        fold(self.student, self.family, mean)
        if not self.is_random:
            place_first_word(self.student, self.family, self.rows[0] - mean, self.text)

    def copy_rows(self) -> None:
        """Give the student's position embedding matrix the rows; what a kept scheme reads there is its own."""
        if not any(SCHEMES[name].reads_table is True for name in self.kept):
            own = table_rows(self.student, self.family)
            own.zero_()[: len(self.rows)] = self.rows[: len(own)]

    def fit_sinusoids(self, scheme: Any) -> None:
        """Set what an embedding-level scheme with `unscaled` vectors learns such that they come near to the rows."""
        _fit_sinusoids(self.student, self.family, scheme, self.rows, self.trained_length)

    def standardize_rows(self) -> None:
        """[`standardize_table`]."""
        standardize_table(self.student, self.family)

    def project_positions(self, norm: nn.Module, query: nn.Module, key: nn.Module, first: nn.Module) -> None:
        """[`project_positions`]."""
        project_positions(self.student, self.teacher, self.family, self.text, (norm, query, key, first))

    def balance_heads(self, layout: str) -> None:
        """[`balance_heads`]."""
        balance_heads(self.student, self.family, self.text, layout)

    def order_heads(self, slopes: list[float]) -> None:
        """[`order_heads`]."""
        order_heads(self.student, self.teacher, self.family, self.text, slopes)


@torch.no_grad()
def start(
    student: nn.Module, teacher: nn.Module, batches: list[Batch] | None = None, trained_length: int | None = None
) -> None:
    """Set the parameters of a student's new schemes from the teacher's positions, without training, in place.

    `initialize_from` of each scheme that the teacher does not have sets what it can. If the student has no embedding-level scheme, the mean
    position embedding is added to the token type embeddings, or to the token embeddings if there are no token types. The token with which all
    texts begin ([CLS]) gets the first position embedding instead. If the student still adds the teacher's position embeddings, nothing is set.

    Args:
        student: the checkpoint, loaded with `from_pretrained(..., position_scheme=...)`, with or without a task head.
        teacher: the same checkpoint, loaded without the argument.
        batches: text, with `input_ids` and `attention_mask`, to measure attention heads on. Default: random tokens.
        trained_length: training length of the checkpoint, in tokens. Default: the number of rows of its position embedding matrix.
    """
    family: Family = student.config.family
    kept = kept_schemes(student, teacher)
    if add_rows(kept):
        return
    with undisturbed(student), undisturbed(teacher, "eager"):
        rows = joined_positions(teacher, family, number_of_positions(student, family))
        text = batches
        if text is None:
            text = [_text_of(_random_words(teacher, RANDOM_TEXT[0], min(RANDOM_TEXT[1], len(rows))))]
        given = Start(student, teacher, family, rows, trained_length or len(rows), text, batches is None)
        scheme = family.embeddings_of(student.base_model).position_scheme
        if scheme is None:
            given.fold_mean()
        elif not keeps_scheme(scheme.name, student.config, teacher.config):
            scheme.initialize_from(given)
        for scheme in family.self_attention_of(family.layers_of(given.encoder)[0]).position_schemes:
            if scheme.name not in kept:
                scheme.initialize_from(given)


def schemes_of(model: nn.Module) -> set[str]:
    """The names of a model's schemes; of an original model, of those that its family's checkpoints were trained with."""
    return {*scheme_names(scheme_of(model.config))}


def kept_schemes(student: nn.Module, teacher: nn.Module) -> set[str]:
    """The names of the schemes that a student shares with its original."""
    return schemes_of(student) & schemes_of(teacher)


def heads_are_free(student: nn.Module, teacher: nn.Module) -> bool:
    """Whether attention heads may be reordered: nothing of the original's that the student keeps tells one head from another."""
    return not of_the_attention(kept_schemes(student, teacher))


def add_rows(names: set[str]) -> bool:
    """Whether one of some schemes adds rows of the position embedding matrix to the token embeddings."""
    return any(SCHEMES[name].uses_table for name in names)


def of_the_attention(names: set[str]) -> list[type[AttentionScheme]]:
    """Those of some schemes that act inside the self-attention, where heads are told apart."""
    return [scheme for name in names if issubclass(scheme := SCHEMES[name], AttentionScheme)]


def number_of_positions(model: nn.Module, family: Family) -> int:
    """How many positions a table of absolute positions has, or would have, in a model."""
    return model.config.max_position_embeddings - family.first_position(model.config)


def table_rows(model: nn.Module, family: Family) -> torch.Tensor:
    """A model's table of absolute positions from the first position on, (positions, width)."""
    table = getattr(family.embeddings_of(model.base_model), family.table).weight.detach()
    return table[family.first_position(model.config) :]


def joined_positions(model: nn.Module, family: Family, positions: int) -> torch.Tensor:
    """What is added to a model's token embeddings at each position, (positions, width): zeros where only the attention has positions.

    Rows of a table, all of them, or `positions` vectors of a scheme that has no table. Where they are combined by something else than a
    sum (`position_combine`), their combination with a token embedding of zeros.
    """
    if not isinstance(model.config, PositionConfigMixin):
        return table_rows(model, family)
    embeddings = family.embeddings_of(model.base_model)
    scheme = embeddings.position_scheme
    words = getattr(embeddings, family.words).weight
    if scheme is None:
        return words.new_zeros(positions, words.shape[1])
    number = len(table_rows(model, family)) if scheme.uses_table else positions
    vectors = embeddings.position_vectors(None, number, 0, words.device)
    return embeddings.position_combine.combine(embeddings, torch.zeros_like(vectors), vectors)[0]


def fold(student: nn.Module, family: Family, vector: torch.Tensor) -> None:
    """Add a vector (width,) to the embedding of every token: to all token types, or to all rows of the matrix.

    A task head that predicts tokens with the same matrix then adds a number to all of a token's logits, which softmax does not see.
    """
    table = getattr(family.embeddings_of(student.base_model), family.token_types or family.words)
    table.weight += vector.to(table.weight)


def place_first_word(student: nn.Module, family: Family, vector: torch.Tensor, batches: list[Batch]) -> None:
    """Add a vector (width,) to the embedding of the word that begins every text, if one does: it is nowhere else.

    A task head that predicts tokens with the same matrix then scores this one otherwise, which is no token of a text.
    """
    first = torch.cat([batch["input_ids"][:, 0] for batch in batches]).unique()
    elsewhere = torch.cat([batch["input_ids"][:, 1:].flatten() for batch in batches])
    if len(first) == 1 and not (elsewhere == first).any():
        getattr(family.embeddings_of(student.base_model), family.words).weight[first] += vector


def fit_sinusoids(
    rows: torch.Tensor, vectors: torch.Tensor, trained_length: int, noise: float = NOISE
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A table of positions as an affine function of others, by weighted ridge regression in float64.

    Minimises Σ_i c_i |row_i - W (v_i + ε_i) - b|² in the mean over ε, which is `noise` times the RMS of the vectors' features in each of
    them: the ridge is Σ_i c_i · noise² · (mean square of the features), and does not touch the constant (Bishop 1995, "Training with
    noise is equivalent to Tikhonov regularization").

    Args:
        rows: (positions, width), the table.
        vectors: (positions, features).
        trained_length: rows beyond count [`BEYOND`] times as much as those within (their c_i).
        noise: part of itself by which a product may be off.

    Returns:
        matrix (width, features), constant (width,), and the part of the variance that is lost, both of the first
        `trained_length` positions.
    """
    rows, vectors = rows.double(), vectors.double()
    weights = torch.full((len(rows), 1), BEYOND, dtype=torch.float64, device=rows.device)
    weights[:trained_length] = 1.0
    means = [(weights * part).sum(0) / weights.sum() for part in (rows, vectors)]
    centred, features = rows - means[0], vectors - means[1]
    gram = features.T @ (weights * features)
    gram.diagonal().add_(noise**2 * weights.sum() * vectors.square().mean())
    matrix = torch.linalg.solve(gram, features.T @ (weights * centred)).T
    lost = (centred - features @ matrix.T)[:trained_length].square().sum() / centred[:trained_length].square().sum()
    return matrix, means[0] - matrix @ means[1], float(lost)


def best_sinusoids(table: torch.Tensor, trained_length: int, layout: str = "interleaved") -> dict[str, float]:
    """The `position_base` and `position_frequency` whose sinusoids, concatenated and projected, come nearest to a table.

    Learned tables may have much of their variance beyond the fastest of the published sinusoids: all-MiniLM-L6-v2's has a line at 1.08
    radians from one position to the next.

    Args:
        table: (positions, width), as [`joined_positions`] gives it.
        trained_length: positions that count.
        layout: `position_layout`.
    """
    slots = torch.arange(len(table), device=table.device)

    def lost(base: float, frequency: float) -> float:
        vectors = sinusoids(slots, table.shape[1], base, layout, precise_dtype(table.device), frequency)
        return fit_sinusoids(table, vectors, trained_length)[2]

    pairs = [(base, frequency) for base in BASES for frequency in FREQUENCIES]
    base, frequency = min(pairs, key=lambda pair: lost(*pair))
    return {"position_base": base, "position_frequency": frequency}


def _fit_sinusoids(student: nn.Module, family: Family, scheme: Any, rows: torch.Tensor, trained_length: int) -> None:
    """Sinusoids that come near the table: any linear function of them (concat), or a multiple."""
    embeddings = family.embeddings_of(student.base_model)
    width = rows.shape[1]
    if scheme.width:
        return  # they are concatenated to the token embeddings, and there is nothing to fit
    unit = scheme.unscaled(torch.arange(len(rows), device=rows.device), width, precise_dtype(rows.device))
    if type(embeddings.position_combine) is Concat:
        matrix, constant, _ = fit_sinusoids(rows, unit * embeddings.position_scale(), trained_length)
        embeddings.position_projection.weight[:, width:] = matrix.to(rows)
        embeddings.position_projection.bias += constant.to(rows)
        return
    rows, unit = rows[:trained_length], unit[:trained_length].to(rows)
    centred = unit - unit.mean(0)
    scale = (centred * rows).sum() / centred.square().sum()
    embeddings.position_scale.weight.fill_(scale)
    fold(student, family, rows.mean(0) - scale * unit.mean(0))


def _random_words(teacher: nn.Module, rows: int, length: int) -> torch.Tensor:
    """Ids of random tokens that are not padding, (rows, length)."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(teacher.config.vocab_size, (rows, length), generator=generator)
    padding = teacher.config.pad_token_id
    return words.where(words != padding, words + (1 if padding == 0 else -1)).to(teacher.device)


def _text_of(input_ids: torch.Tensor) -> Batch:
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def standardize_table(student: nn.Module, family: Family) -> None:
    """Rows of the table of mean 0 and variance 1, as `tupe`'s LayerNorm, which alone reads them, makes them anyway.

    Pretrained rows are small compared with an optimizer's step (MiniLM: a standard deviation of 0.025), and LayerNorm divides by
    that. A row of zeros stays.
    """
    rows = table_rows(student, family)
    rows.copy_(nn.functional.layer_norm(rows, rows.shape[1:], eps=student.config.sizes.layer_norm_eps))


def project_positions(
    student: nn.Module,
    teacher: nn.Module,
    family: Family,
    batches: list[Batch],
    modules: tuple[nn.Module, nn.Module, nn.Module, nn.Module],
) -> None:
    """Projections of positions such that positions score what the student's attention lacks, and heads in an order that suits them.

    All layers share the projections, so that heads of one index should look for the same positions in all of them: each layer's
    heads are put in the order in which they do so most. Positions then score the weighted mean over the layers of what is missing,
    as far as a head's width allows: the leading singular vectors are their queries and keys. [CLS] has a score of its own as a
    key; each query's scores are counted from it.

    Args:
        modules: that all layers share: the LayerNorm of the rows, the projections to queries and keys, and the score of [CLS] as a key.
    """
    norm, of_query, of_key, first = modules
    encoder = family.encoder_of(student.base_model)
    layers = family.layers_of(encoder)
    wanted, weights = missing_scores(student, teacher, family, batches)
    if heads_are_free(student, teacher):
        orders = agreeing_heads(wanted, weights)
        for layer, order in zip(layers, orders):
            permute_heads(layer, family, order)
        wanted, weights = _in_order(wanted, orders), _in_order(weights, orders)
    scores = _mean_over_layers(wanted, weights)  # (heads, query, key)
    of_queries = weights.sum(0)[:, 1:, 0]
    to_first = (of_queries * scores[:, 1:, 0]).sum(1) / of_queries.sum(1).clamp(min=SMALLEST_WEIGHT)
    scores = scores[:, 1:, 1:] - scores[:, 1:, :1] + to_first[:, None, None]
    attention = family.self_attention_of(layers[0])
    left, strength, right = torch.linalg.svd(scores)
    width = attention.head_dim
    strength = strength[:, None, :width].sqrt()
    query, key = left[..., :width] * strength / attention.scaling, right.mT[..., :width] * strength
    places = norm(table_rows(student, family)[1 : scores.shape[1] + 1]).cpu()
    for linear, target in ((of_query, query), (of_key, key)):
        target = nn.functional.pad(target, (0, width - target.shape[-1])).transpose(0, 1).flatten(1)
        matrix, constant, _ = fit_sinusoids(target, places, len(places), noise=RIDGE**0.5)
        linear.weight.copy_(matrix)
        linear.bias.copy_(constant)
    first.weight.copy_(to_first)


def missing_scores(
    student: nn.Module, teacher: nn.Module, family: Family, batches: list[Batch]
) -> tuple[torch.Tensor, torch.Tensor]:
    """By how much the original's scores between two positions are greater than the student's, and how much it attends there.

    Returns:
        Two tensors (layers, heads, query, key) in float64, means over the texts that have both positions; 0 where none has.
    """
    original, own = (LayerByLayer(model.base_model, family, batches) for model in (teacher, student))
    length = max(batch["input_ids"].shape[1] for batch in batches)
    missing, weights = [], []
    for layer in range(len(own.layers)):
        attention, of_original = own.attention(layer), original.attention(layer)
        sums = torch.zeros(2, attention.num_heads, length, length, dtype=torch.float64)
        counts = torch.zeros(length, length, dtype=torch.float64)
        for index, batch in enumerate(batches):
            mask = batch["attention_mask"].double()
            here = slice(0, mask.shape[1])
            wanted, given = (
                scaling * _score_sums(module, family, run.hidden_states[index], mask)
                for module, run, scaling in (
                    (of_original, original, attention.head_dim**-0.5),
                    (attention, own, attention.scaling),
                )
            )
            sums[0, :, here, here] += (wanted - given).cpu()
            attended = original.run_for_weights(layer, index).double() * mask[:, None, :, None]
            sums[1, :, here, here] += attended.sum(0).cpu()
            counts[here, here] += (mask.T @ mask).cpu()
            own.run(layer, index)
        means = sums / counts.clamp(min=1)
        missing.append(means[0])
        weights.append(means[1])
    return torch.stack(missing), torch.stack(weights)


def _score_sums(attention: nn.Module, family: Family, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Products of queries and keys between positions, (heads, length, length), summed over the texts that have both.

    Args:
        states: (batch, length, hidden), the input of the attention.
        mask: float64 (batch, length), 1 for tokens.
    """
    width = getattr(attention, family.head_dim)
    query, key = (
        (getattr(attention, name)(states).double() * mask[..., None]).unflatten(-1, (-1, width))
        for name in (family.query, family.key)
    )
    return torch.einsum("bihd,bjhd->hij", query, key)


def agreeing_heads(scores: torch.Tensor, weights: torch.Tensor, rounds: int = 8) -> list[list[int]]:
    """For each layer an order of its heads, such that heads of one index differ least in their scores over the layers.

    In turns, indices get the weighted mean of their heads' scores, and layers the best assignment of heads to indices: k-means
    with one head of each layer in each cluster. It begins with each layer's own scores once; the best end counts.

    Args:
        scores: (layers, heads, query, key); a constant added to a query's scores does not count.
        weights: the same shape, of the squared differences.
    """
    best, fewest = [[*range(scores.shape[1])]] * len(scores), float("inf")
    for centres in scores:
        before = float("inf")
        for _ in range(rounds):
            costs = [_weighted_differences(*layer, centres) for layer in zip(scores, weights)]
            orders = [best_assignment(cost) for cost in costs]
            total = sum(float(cost[order, range(len(order))].sum()) for cost, order in zip(costs, orders))
            if total < fewest:
                best, fewest = orders, total
            if total >= before:
                break
            before = total
            centres = _mean_over_layers(_in_order(scores, orders), _in_order(weights, orders))
    return best


def _in_order(of_heads: torch.Tensor, orders: list[list[int]]) -> torch.Tensor:
    """What heads have, (layers, heads, ...), with the heads of each layer in their order."""
    return torch.stack([layer[order] for layer, order in zip(of_heads, orders)])


def _weighted_differences(scores: torch.Tensor, weights: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Weighted squared differences of heads from centres, (heads, indices), a constant being free for each query.

    Args:
        scores, weights: (heads, query, key).
        centres: (indices, query, key).
    """
    totals = weights.sum(-1).clamp(min=SMALLEST_WEIGHT)
    costs = []
    for centre in centres:
        difference = scores - centre
        squares, sums = ((weights * difference**power).sum(-1) for power in (2, 1))
        costs.append((squares - sums.square() / totals).sum(-1))
    return torch.stack(costs, dim=1)


def _mean_over_layers(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean (heads, query, key) of scores (layers, heads, query, key), each query's counted from their weighted mean."""
    constants = (weights * scores).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(min=SMALLEST_WEIGHT)
    return (weights * (scores - constants)).sum(0) / weights.sum(0).clamp(min=SMALLEST_WEIGHT)


def _head_rows(linear: nn.Module, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a projection's weight (heads, head_dim, hidden) and bias (heads, head_dim)."""
    return linear.weight.unflatten(0, (heads, -1)), linear.bias.unflatten(0, (heads, -1))


def balance_heads(student: nn.Module, family: Family, batches: list[Batch], layout: str) -> None:
    """Layer after layer, the basis of each head's queries and keys that `rope` disturbs least.

    With q' = A q and k' = A^-T k scores are what they were where nothing is rotated. A is such that both have the same diagonal
    second moments Λ: the balanced realisation of control theory (Moore 1981). What is weakest in a score then turns fastest.
    """
    run = LayerByLayer(student.base_model, family, batches)
    for layer in range(len(run.layers)):
        attention = run.attention(layer)
        states = torch.cat([h[b["attention_mask"].bool()] for h, b in zip(run.hidden_states, batches)])
        heads = attention.num_heads
        projections = attention.query_projection, attention.key_projection
        # (heads, tokens, head_dim)
        query, key = (p(states).unflatten(-1, (heads, -1)).transpose(0, 1).double() for p in projections)
        mean = key.mean(1)
        forward, backward = balanced_basis(query, key - mean[:, None])
        order = pair_order(attention.head_dim, layout)
        forward, backward = forward[:, order], backward[:, order]
        for linear, basis, removed in zip(projections, (forward, backward), (torch.zeros_like(mean), mean)):
            weight, bias = _head_rows(linear, heads)
            weight.copy_(basis @ weight.double())
            bias.copy_((basis @ (bias.double() - removed)[..., None])[..., 0])
        for index in range(len(batches)):
            run.run(layer, index)


def balanced_basis(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and A^-T, each (heads, head_dim, head_dim), such that A q and A^-T k have the same diagonal second moments, ascending.

    Args:
        query, key: (heads, tokens, head_dim) in float64.
    """
    moments = []
    for states in (query, key):
        moment = states.transpose(1, 2) @ states / states.shape[1]
        moment.diagonal(dim1=1, dim2=2).add_(RIDGE * moment.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True))
        moments.append(moment)
    root = torch.linalg.cholesky(moments[0])
    squares, vectors = torch.linalg.eigh(root.mT @ moments[1] @ root)
    strength = squares.clamp(min=torch.finfo(squares.dtype).tiny) ** 0.25  # of each of the two factors
    forward = strength[..., None] * torch.linalg.solve_triangular(root.mT, vectors, upper=True).mT
    backward = (vectors / strength[:, None]).mT @ root.mT
    return forward, backward


def pair_order(head_dim: int, layout: str) -> torch.Tensor:
    """Which of the directions, ascending by strength, is which feature of a head: the first two make the fastest pair."""
    if layout == "interleaved":
        return torch.arange(head_dim)
    return torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])


def order_heads(
    student: nn.Module, teacher: nn.Module, family: Family, batches: list[Batch], slopes: list[float]
) -> None:
    """Layer after layer, reorder attention heads such that a penalty by distance, with a slope for each index, changes attention least."""
    original, own = (LayerByLayer(model.base_model, family, batches) for model in (teacher, student))
    for layer in range(len(own.layers)):
        attention = own.attention(layer)
        cost = torch.zeros(len(slopes), len(slopes), dtype=torch.float64)  # (head, index)
        for index, batch in enumerate(batches):
            seen = observe(own, layer, index, original.run_for_weights(layer, index), batch)
            query, key, contexts = seen.project()
            positions = contexts[0].positions
            distance = positions.per_pair(positions.relative).abs()[:, None].to(query)
            scores = query @ key.transpose(-1, -2) * attention.scaling
            for place, slope in enumerate(slopes):
                cost[:, place] += seen.difference(scores - slope * distance).cpu()
        permute_heads(own.layers[layer], family, best_assignment(cost))
        for index in range(len(batches)):
            own.run(layer, index)


def best_assignment(cost: torch.Tensor) -> list[int]:
    """Which row goes to each column of a square matrix of costs, such that their sum is the smallest (Crouse 2016, as in SciPy).

    Raises:
        ImportError: SciPy is not installed.
    """
    check_installed("scipy", "hf_posenc[train]")
    from scipy.optimize import linear_sum_assignment  # only here: the rest of the package does without

    _, rows = linear_sum_assignment(cost.T.numpy())
    return rows.tolist()


def permute_heads(layer: nn.Module, family: Family, order: list[int]) -> None:
    """Put heads of a layer in another order, which changes nothing that the layer computes."""
    attention = family.self_attention_of(layer)
    for name in (family.query, family.key, family.value):
        for rows in _head_rows(getattr(attention, name), len(order)):
            rows.copy_(rows[order].clone())
    columns = family.output_projection_of(layer).weight.unflatten(1, (len(order), -1))
    columns.copy_(columns[:, order].clone())
