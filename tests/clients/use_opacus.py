"""Opacus clips the gradient of each sample: with every scheme, at every size of a batch, it has the right ones or is refused."""

import torch
from observing import difference
from opacus import PrivacyEngine
from opacus.grad_sample import wrap_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import hf_posenc


SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# What each scheme has, and what it may have otherwise.
CASES = [*((name, {}) for name in hf_posenc.modeling.schemes.table.SCHEMES)]
CASES += [
    ("rope+alibi", {}),
    ("rope+t5", {}),
    ("absolute", {"position_combine": "concat"}),
    ("sinusoidal", {"position_learn_amplitude": True}),
    ("sinusoidal", {"position_every_layer": True}),
    ("t5", {"position_per_layer": True}),
    ("deberta", {"position_share_projections": False}),
]
WITHOUT_PARAMETERS = ("rope", "alibi", "none", "sinusoidal", "rope+alibi")
LENGTH = 12
# 23 distances of twelve tokens, 32 buckets of t5: rows that a batch of as many samples could be taken for.
BATCHES = (1, 3, 2 * LENGTH - 1, 32)


def classifier(scheme: str, flags: dict, frozen: bool = False) -> BertForSequenceClassification:
    """A model whose positions count, frozen or not: those of schemes and the table of absolute positions."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, position_scheme=scheme, **flags)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
        for parameter in hf_posenc.position_parameters(model).values():
            parameter.normal_(std=0.2).requires_grad_(not frozen)
    table = getattr(model.bert.embeddings, "position_embeddings", None)
    if table is not None:
        table.requires_grad_(not frozen)
    return model


def samples(batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[1::2, LENGTH // 2 :] = 0  # half of it is left out without Opacus
    ids = torch.randint(5, SIZES["vocab_size"], (batch, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(batch) % 2}


def one_by_one(model: BertForSequenceClassification, batch: dict) -> dict[str, torch.Tensor]:
    """The gradient of each sample, computed alone."""
    gradients: dict[str, list[torch.Tensor]] = {}
    for row in range(len(batch["labels"])):
        model.zero_grad()
        model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradients.setdefault(name, []).append(parameter.grad.clone())
    model.zero_grad()
    return {name: torch.stack(rows) for name, rows in gradients.items()}


def computed(model: BertForSequenceClassification, batch: dict, mode: str) -> dict[str, torch.Tensor] | None:
    """What Opacus has of each sample, gradients or norms; None where it is refused."""
    wrapped = wrap_model(model, mode, loss_reduction="mean")
    try:
        wrapped(**batch).loss.backward()
    except ValueError as error:
        assert "per-sample gradients (Opacus)" in str(error), error
        return None
    what = "_norm_sample" if mode == "ghost" else "grad_sample"
    return {name: getattr(p, what) for name, p in model.named_parameters() if p.requires_grad}


def compare(scheme: str, flags: dict, batch: dict, mode: str, frozen: bool = False) -> float | None:
    """The largest difference; None where Opacus is refused."""
    found = computed(classifier(scheme, flags, frozen), batch, mode)
    if found is None:
        return None
    expected = one_by_one(classifier(scheme, flags, frozen), batch)
    if mode == "ghost":
        expected = {name: rows.flatten(1).norm(dim=1) for name, rows in expected.items()}
    assert found.keys() == expected.keys()
    assert max(float(rows.abs().max()) for rows in expected.values()) > 1e-3
    return max(difference(found[name], expected[name]) for name in found)


def trained() -> float:
    """Every scheme as it is: right without parameters, and refused, whatever the batch, where it has some."""
    largest = 0.0
    for scheme, flags in CASES:
        for mode in ("hooks", "functorch", "ghost"):
            for size in BATCHES if mode == "hooks" else BATCHES[-1:]:
                found = compare(scheme, flags, samples(size), mode)
                takes = (scheme in WITHOUT_PARAMETERS and not flags) or (scheme == "absolute" and size == 1)
                assert (found is not None) == takes, (scheme, flags, mode, size, found)
                largest = max(largest, found or 0.0)
    return largest


def frozen() -> float:
    """Positions that are not trained are no matter, unless other parameters reach them once for a batch."""
    largest = 0.0
    for scheme, flags in CASES:
        for size in BATCHES[1:]:
            found = compare(scheme, flags, samples(size), "hooks", frozen=True)
            assert (found is None) == (scheme == "deberta" and not flags), (scheme, flags, size, found)
            largest = max(largest, found or 0.0)
    return largest


def positions_of_each_sample() -> float:
    batch = samples(32) | {"position_ids": torch.arange(LENGTH).expand(32, -1)}
    found = [compare("absolute", flags, batch, "hooks") for flags in ({}, {"position_combine": "concat"})]
    assert None not in found
    return max(found)


def private_step() -> float:
    """One step of an engine that clips, without noise: the mean of clipped gradients."""
    model, batch = classifier("rope", {}), samples(16)
    expected = one_by_one(model, batch)
    norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in expected.values()]).norm(dim=0)
    bound = float(norms.median())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(*batch.values()), batch_size=16)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        poisson_sampling=False,
    )
    for rows in loader:
        private(**dict(zip(batch, rows))).loss.backward()
        optimizer.step()
    clipped = (bound / (norms + 1e-6)).clamp(max=1)
    wanted = {name: torch.einsum("n,n...->...", clipped, rows) / 16 for name, rows in expected.items()}
    return max(difference(before[name] - p.detach(), wanted[name]) for name, p in model.named_parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for check in (trained, frozen, positions_of_each_sample, private_step):
        found = check()
        assert found < 1e-6, (check.__name__, found)
        print(f"{check.__name__}: gradients differ by {found:.0e}", flush=True)
