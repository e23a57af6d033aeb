"""Random attacks: what the plugin computes beside stock transformers, unpad=False, eager, float64 and uncached copies.

`python tests/hostile/attack.py --cases 500 --seed 0` prints how many cases ran in each area, and each failure with the
number that makes it again: `--area AREA --case NUMBER`.
"""

import copy
import pickle
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import DebertaConfig, DebertaV2Config, DynamicCache, EncoderDecoderCache, StaticCache


sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

import loop  # noqa: E402
import tiny  # noqa: E402
from loop import note  # noqa: E402

import hf_posenc  # noqa: E402
from hf_posenc.modeling.kernels import packing  # noqa: E402
from hf_posenc.modeling.kernels.caching import cache_projections  # noqa: E402
from hf_posenc.modeling.schemes.table import SCHEMES  # noqa: E402


TOLERANCE = 1e-7


class Differs(AssertionError):
    """The plugin computes something else."""


# --- comparing ----------------------------------------------------------------------------------------------------------


def flat(value, name="output"):
    """The tensors of an output, by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from flat(part, f"{name}[{index}]")


def where(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """A tensor with zeros at padding, where it has a place for each token."""
    if kept is not None and tensor.dim() >= 2 and tensor.shape[:2] == kept.shape and tensor.is_floating_point():
        return torch.where(kept.view(*kept.shape, *[1] * (tensor.dim() - 2)), tensor, 0)
    return tensor


def compare(found, expected, kept=None, tolerance=TOLERANCE) -> None:
    found, expected = dict(flat(found)), dict(flat(expected))
    if found.keys() != expected.keys():
        raise Differs(f"other outputs: {sorted(found)} for {sorted(expected)}")
    for name, right in expected.items():
        left = found[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            raise Differs(f"{name}: {left.shape} {left.dtype} for {right.shape} {right.dtype}")
        left, right = where(left, kept).double(), where(right, kept).double()
        if not torch.equal(left.isnan(), right.isnan()):
            raise Differs(f"{name}: NaN where there was none, or the other way round")
        difference = (left - right).nan_to_num(0, 0, 0).abs().max().item() if left.numel() else 0.0
        scale = max(1.0, right.nan_to_num(0, 0, 0).abs().max().item() if right.numel() else 1.0)
        if difference > tolerance * scale:
            raise Differs(f"{name}: off by {difference:.3g} (largest {scale:.3g})")


def outcome(call):
    """What a call returns, or its error."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return None, error


def gradients(model: nn.Module, output, kept, seed: int) -> dict:
    """Gradients of a random sum over all that is not padding."""
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for _name, tensor in flat(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            total = total + (where(tensor, kept) * weights).sum()
    model.zero_grad()
    if isinstance(total, torch.Tensor):
        total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_same(model, reference, arguments, kept, with_gradients, seed, tolerance=TOLERANCE, args=()):
    """Outputs, errors and gradients of two models."""
    found, error = outcome(lambda: model(*args, **arguments))
    expected, right_error = outcome(lambda: reference(*args, **arguments))
    if (error is None) != (right_error is None):
        raise Differs(f"error {error!r} for {right_error!r}")
    if error is not None:
        note("both refuse")
        return
    compare(found, expected, kept, tolerance)
    if with_gradients:
        left, left_error = outcome(lambda: gradients(model, found, kept, seed))
        right, right_error = outcome(lambda: gradients(reference, expected, kept, seed))
        if (left_error is None) != (right_error is None):
            raise Differs(f"backward: {left_error!r} for {right_error!r}")
        if left_error is None:
            # A parameter of padding alone may have no gradient here, and zeros there.
            for name in left.keys() | right.keys():
                shape = (
                    dict(model.named_parameters())[name] if name in left else dict(reference.named_parameters())[name]
                )
                zero = torch.zeros_like(shape)
                compare(left.get(name, zero), right.get(name, zero), None, tolerance)
                note("gradients")


# --- inputs -------------------------------------------------------------------------------------------------------------


def random_mask(rng: random.Random, batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    side = rng.choice(["right", "left", "inner", "mixed", "first", "none"])
    for row in range(batch):
        width = rng.randrange(0, length)
        if side in ("right", "mixed") and rng.random() < 0.9:
            mask[row, length - width :] = 0
        if side == "left" and width:
            mask[row, :width] = 0
        if side in ("inner", "mixed"):
            mask[row] *= (torch.rand(length) < 0.6).long()
        if side == "first":
            mask[row, 0] = 0
            mask[row, length - width + 1 :] = 0
        if not mask[row].any() and rng.random() < 0.9:
            mask[row, rng.randrange(length)] = 1
    return mask


def disguise(rng: random.Random, mask: torch.Tensor) -> torch.Tensor | None:
    """Another dtype or shape of a mask."""
    batch, length = mask.shape
    kind = rng.choice(
        ["same"] * 8 + list("bfihdnrz") + ["one", "3d", "4d", "4dbool", "wrong", "none", "flat", "4dkeys"]
    )
    if rng.random() < 0.4:
        return mask
    match kind:
        case "b":
            return mask.bool()
        case "f":
            return mask.float()
        case "i":
            return mask.to(torch.int8)
        case "h":
            return mask.half()
        case "d":
            return mask.double()
        case "n":
            return mask.repeat_interleave(2, 1)[:, ::2]
        case "r":
            return mask.double().requires_grad_()
        case "z":
            return mask.t().contiguous().t()
        case "one":
            return mask[:1]
        case "3d":
            return mask[:, None].expand(batch, length, length) * mask[:, :, None]
        case "4d":
            return torch.zeros(batch, 1, length, length).double().masked_fill(mask[:, None, None] == 0, -1e30)
        case "4dbool":
            return mask.bool()[:, None, None].expand(batch, 1, length, length)
        case "4dkeys":
            return mask.bool()[:, None, None]
        case "wrong":
            return rng.choice([mask[:, :-1], torch.cat([mask, mask], 1), mask.flatten()[None], mask[:, :, None]])
        case "none":
            return None
        case "flat":
            return mask.flatten() if rng.random() < 0.5 else mask[0]
    return mask


def random_inputs(rng: random.Random, config, head: str, batch: int, length: int) -> tuple[dict, torch.Tensor]:
    mask = random_mask(rng, batch, length)
    arguments = {"input_ids": torch.randint(5, 99, (batch, length))}
    if head == "ForMultipleChoice":
        arguments["input_ids"] = arguments["input_ids"].view(batch // 2, 2, length)
    given = mask.view(batch // 2, 2, length) if head == "ForMultipleChoice" else disguise(rng, mask)
    if given is not None or rng.random() < 0.5:
        arguments["attention_mask"] = given
    if head != "ForMultipleChoice":
        if config.model_type.split("-")[-1] not in ("distilbert", "mpnet") and rng.random() < 0.3:
            if getattr(config, "type_vocab_size", 0) > 1:
                arguments["token_type_ids"] = torch.randint(0, 2, (batch, length))
        if rng.random() < 0.3:
            rows = rng.choice([1, batch])
            arguments["position_ids"] = torch.randint(2, 60, (rows, length))
        if rng.random() < 0.15:
            width = getattr(config, "embedding_size", None) or getattr(config, "hidden_size", None) or config.dim
            arguments["inputs_embeds"] = torch.randn(batch, length, width, dtype=torch.float64)
            del arguments["input_ids"]
    if rng.random() < 0.15:
        arguments["return_dict"] = False
    if rng.random() < 0.15:
        arguments["output_hidden_states"] = True
    if rng.random() < 0.1:
        arguments["output_attentions"] = True
    if head != "Model" and rng.random() < 0.6:
        arguments |= random_labels(rng, head, batch, length, mask)
    return arguments, mask


def random_labels(rng, head, batch, length, mask) -> dict:
    if head == "ForQuestionAnswering":
        shape = rng.choice([(batch,), (batch, 1)])
        return {name: torch.randint(0, length + 3, shape) for name in ("start_positions", "end_positions")}
    if head == "ForSequenceClassification":
        kind = rng.choice(["class", "multi", "odd"])
        if kind == "multi":
            return {"labels": torch.rand(batch, 2, dtype=torch.float64)}
        return {"labels": torch.randint(0, 2, (batch,) if kind == "class" else (batch, 1))}
    if head == "ForMultipleChoice":
        return {"labels": torch.randint(0, 2, (batch // 2,))}
    classes = 99 if head in ("ForMaskedLM", "ForCausalLM", "LMHeadModel") else 2
    labels = torch.randint(0, classes, (batch, length))
    kind = rng.choice(["clean", "clean", "dirty", "few", "flat", "int32", "float", "wrong"])
    if kind != "dirty":
        labels = labels.masked_fill(mask == 0, -100)
    if kind == "few":
        labels = labels.masked_fill(torch.rand(batch, length) < 0.8, -100)
    if kind == "flat":
        labels = labels.flatten()
    if kind == "int32":
        labels = labels.int()
    if kind == "float":
        labels = labels.double()
    if kind == "wrong":
        labels = labels[:, 1:]
    return {"labels": labels}


HEADS = [
    "Model",
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
]
HEADS += ["ForMultipleChoice", "ForPreTraining", "LMHeadModel", "ForCausalLM"]
FAMILIES = [*tiny.FAMILIES]
SCHEME_NAMES = [*SCHEMES, "absolute+t5", "absolute+deberta", "tupe+t5", "sinusoidal+rope"]


def a_head(rng, family: str) -> str:
    names = {stock.__name__.removeprefix(tiny._stock_prefix(family)) for stock in tiny.heads(family)}
    return rng.choice([head for head in HEADS if head in names])


def kept_places(arguments: dict, mask: torch.Tensor, batch: int, length: int) -> torch.Tensor | None:
    """Where outputs must agree: everywhere, if the mask is not one of tokens."""
    given = arguments.get("attention_mask")
    return None if given is None or given.shape != mask.shape else mask.bool()


# --- areas --------------------------------------------------------------------------------------------------------------


def attack_variants(rng: random.Random) -> None:
    """unpad=True beside unpad=False."""
    family = rng.choice(FAMILIES)
    head, scheme = a_head(rng, family), rng.choice(SCHEME_NAMES)
    backend = rng.choice(["sdpa", "eager"])
    flags = {"attn_implementation": backend}
    if scheme not in ("none",) and rng.random() < 0.2 and scheme.startswith(("absolute", "sinusoidal")):
        flags["position_every_layer"] = True
    model = no_dropout(tiny.build(scheme, family, head, **flags)).double()
    reference = copy.deepcopy(model)
    for part in reference.modules():
        if hasattr(part, "config"):
            part.config.unpad = False
    batch, length = rng.choice([2, 4, 8]), rng.choice([9, 20, 40])
    if head == "ForMultipleChoice":
        length = min(length, 20)
    arguments, mask = random_inputs(rng, model.config, head, batch, length)
    train = rng.random() < 0.5
    model.train(train), reference.train(train)
    if rng.random() < 0.2 and train and model.supports_gradient_checkpointing:
        settings = rng.choice([None, {"use_reentrant": True}, {"use_reentrant": False}])
        for each in (model, reference):
            each.gradient_checkpointing_enable(settings)
    args = ()
    if rng.random() < 0.2 and "input_ids" in arguments and "attention_mask" in arguments and family != "distilbert":
        args = (arguments.pop("input_ids"), arguments.pop("attention_mask"))
    if rng.random() < 0.15:
        autocast_case(model, reference, args, arguments, kept_of(args, arguments, mask))
        return
    kept = kept_of(args, arguments, mask)
    check_same(model, reference, arguments, kept, rng.random() < 0.6, rng.randrange(1000), args=args)


def kept_of(args, arguments, mask):
    given = args[1] if len(args) > 1 else arguments.get("attention_mask")
    return mask.bool() if given is not None and tuple(given.shape) == tuple(mask.shape) else None


def autocast_case(model, reference, args, arguments, kept):
    for each in (model, reference):
        each.float()
    arguments = {k: v.float() if torch.is_tensor(v) and v.dtype == torch.float64 else v for k, v in arguments.items()}
    with torch.autocast("cpu", torch.bfloat16):
        _, error = outcome(lambda: reference(*args, **arguments))
        if "without overflow" in str(error):
            note("stock DeBERTa's eager attention has no bfloat16")
            return
        check_same(model, reference, arguments, kept, False, 0, tolerance=0.15, args=args)


def stock_model(rng, family: str, head: str, **overrides) -> nn.Module:
    if family in DEBERTAS:
        config = deberta_config(rng, family)
        for name, value in overrides.items():
            setattr(config, name, value)
        import transformers

        name = {"deberta": "Deberta", "deberta-v2": "DebertaV2"}[family] + head
        model = getattr(transformers, name)(config)
    else:
        name = tiny._stock_prefix(family) + head
        cls = next(stock for stock in tiny.heads(family) if stock.__name__ == name)
        model = cls(tiny.stock_config(family, **overrides))
    return randomised(model)


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Biases and norms as a trained model has them, and no dropout."""
    no_dropout(model)
    for _name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.double().eval()


def no_dropout(model: nn.Module) -> nn.Module:
    """Heads have dropouts of their own."""
    for part in model.modules():
        for name in ("p", "drop_prob"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model


DEBERTAS = ("deberta", "deberta-v2")


def deberta_config(rng, family: str):
    sizes = dict(tiny.SIZES)
    types = rng.choice([["c2p", "p2c"], ["c2p"], ["p2c"], []])
    if rng.random() < 0.2:
        types = "|".join(types) if types else types
    sizes |= {
        "relative_attention": rng.random() < 0.85,
        "pos_att_type": types,
        "max_relative_positions": rng.choice([-1, 5, 16, 64]),
        "position_biased_input": rng.random() < 0.5,
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": rng.choice([1, 2, 4]),
        "type_vocab_size": rng.choice([0, 2]),
    }
    if family == "deberta":
        return DebertaConfig(**sizes)
    sizes |= {
        "share_att_key": rng.random() < 0.5,
        "position_buckets": rng.choice([-1, 4, 8, 256]),
        "norm_rel_ebd": rng.choice(["none", "layer_norm"]),
    }
    if rng.random() < 0.15:
        sizes |= {"conv_kernel_size": 3, "conv_act": "gelu"}
    return DebertaV2Config(**sizes)


def attack_stock_unpad(rng: random.Random) -> None:
    """`hf_posenc.unpad(stock)` beside an untouched copy, after changes to the layers."""
    family = rng.choice([*FAMILIES, *DEBERTAS])
    if family in DEBERTAS:
        head = rng.choice(["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
    else:
        head = a_head(rng, family)
    backends = ["eager", "sdpa"]
    model = stock_model(rng, family, head)
    model.set_attn_implementation(rng.choice(backends))
    changes = [rng.choice(sorted(CHANGES)) for _ in range(rng.choice([0, 0, 1, 2]))]
    split = rng.randrange(len(changes) + 1)
    seed = rng.randrange(1000)
    reference = copy.deepcopy(model)
    changed = []
    for each in (model, reference):
        torch.manual_seed(seed)
        for change in changes[:split]:
            each = CHANGES[change](each, family)
        if each is not reference and len(changed) == 0:
            hf_posenc.unpad(each)
        for change in changes[split:]:
            each = CHANGES[change](each, family)
        changed.append(each)
    model, reference = changed
    note("changes " + "+".join(changes[:split]) + " | " + "+".join(changes[split:]) if changes else "no changes")
    batch, length = rng.choice([2, 4, 8]), rng.choice([9, 20, 40])
    arguments, mask = random_inputs(rng, copy.copy(model.config), head, batch, length)
    if family in DEBERTAS:
        arguments.pop("token_type_ids", None)
    train = rng.random() < 0.5
    model.train(train), reference.train(train)
    with_gradients, grad_seed = rng.random() < 0.6, rng.randrange(1000)
    if rng.random() < 0.1:
        autocast_case(model, reference, (), arguments, kept_of((), arguments, mask))
        return
    if rng.random() < 0.1:
        # The model's forward past its hooks.
        model, reference = Direct(model), Direct(reference)
    if rng.random() < 0.1:
        model, reference = (nn.ModuleDict({"inner": each}) for each in (model, reference))
        hf_posenc.unpad(model)
        model, reference = model["inner"], reference["inner"]
    spy = Spy()
    kept = kept_of((), arguments, mask)
    if isinstance(model, Direct) and (given := arguments.get("attention_mask")) is not None and given.dim() == 4:
        kept = (
            mask.bool()
        )  # the encoder cannot tell masks of keys, which it gets as masks of pairs, from those of tokens
    # Packed, DeBERTa's eager attention is computed by sdpa, which does not round its scale to float32 as stock does.
    tolerance = 1e-5 if family in DEBERTAS else TOLERANCE
    check_same(model, reference, arguments, kept, with_gradients, grad_seed, tolerance)
    note("packed" if spy.done() else "not packed")


class Direct(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner.forward(*args, **kwargs)


class Spy:
    """Whether anything was packed."""

    def __init__(self):
        self.found, self.of = 0, packing.Packing.of

        def of(*args, **kwargs):
            self.found += 1
            return self.of(*args, **kwargs)

        packing.Packing.of = of

    def done(self) -> int:
        packing.Packing.of = self.of
        return self.found


def base(model, family):
    model = getattr(model, "base_model", model)
    model = (
        getattr(model, "model", model) if "Peft" in type(model).__name__ or "Lora" in type(model).__name__ else model
    )
    return getattr(model, "base_model", model)


def the_layers(model, family):
    inner = base(model, family)
    owner = inner.transformer if family == "distilbert" else inner.encoder
    return owner, "layer"


def drop_layer(model, family):
    owner, name = the_layers(model, family)
    layers = getattr(owner, name)
    if len(layers) > 1:
        del layers[0]
    return model


def add_layer(model, family):
    owner, name = the_layers(model, family)
    getattr(owner, name).append(copy.deepcopy(getattr(owner, name)[-1]))
    return model


def fresh_layer(model, family):
    """A layer that was never hooked."""
    owner, name = the_layers(model, family)
    layers = getattr(owner, name)
    first = layers[0]
    config = base(model, family).config
    import inspect

    needs_index = "layer_idx" in inspect.signature(type(first).__init__).parameters
    layers[0] = randomised(type(first)(config, layer_idx=0) if needs_index else type(first)(config))
    return model


def share_layer(model, family):
    owner, name = the_layers(model, family)
    layers = getattr(owner, name)
    layers[-1] = layers[0]
    return model


def new_list(model, family):
    owner, name = the_layers(model, family)
    setattr(owner, name, nn.ModuleList([*reversed(getattr(owner, name))]))
    return model


def other_encoder(model, family):
    """An encoder of the same kind, never hooked."""
    inner = base(model, family)
    name = "transformer" if family == "distilbert" else "encoder"
    old = getattr(inner, name)
    new = randomised(type(old)(inner.config))
    setattr(inner, name, new)
    return model


def other_query(model, family):
    """Another projection in the place of one."""
    owner, name = the_layers(model, family)
    for module in getattr(owner, name).modules():
        for part in ("query", "q_lin", "q", "query_proj", "in_proj"):
            if isinstance(getattr(module, part, None), nn.Linear):
                old = getattr(module, part)
                setattr(module, part, nn.Linear(old.in_features, old.out_features, bias=old.bias is not None).double())
    return model


def other_ffn(model, family):
    owner, name = the_layers(model, family)
    for module in getattr(owner, name).modules():
        if isinstance(getattr(module, "dense", None), nn.Linear):
            old = module.dense
            module.dense = nn.Sequential(old, nn.Linear(old.out_features, old.out_features).double())
    return model


def other_norm(model, family):
    owner, name = the_layers(model, family)
    for module in getattr(owner, name).modules():
        if isinstance(getattr(module, "LayerNorm", None), nn.LayerNorm):
            module.LayerNorm.eps = 1e-3
    return model


def lora(model, family):
    from peft import LoraConfig, get_peft_model

    if "Peft" in type(model).__name__:
        return model
    model = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False)
    )
    return model.double().eval()


def copied(model, family):
    return copy.deepcopy(model)


def pickled(model, family):
    if base(model, family).is_gradient_checkpointing:
        return model  # PEFT's hook for it is a local function
    if any(torch.nn.utils.parametrize.is_parametrized(module) for module in model.modules()):
        return model  # PyTorch pickles none of these
    return pickle.loads(pickle.dumps(model))


def checkpointed(model, family):
    inner = base(model, family)
    if inner.supports_gradient_checkpointing:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def encoder_hooked(model, family):
    owner, name = the_layers(model, family)
    getattr(owner, name)[0].register_forward_hook(pass_on)
    return model


def pass_on(module, args, output):
    """A hook that looks at the output."""


def parametrised(model, family):
    owner, name = the_layers(model, family)
    for module in getattr(owner, name)[0].modules():
        if isinstance(module, nn.Linear) and not hasattr(module, "parametrizations"):
            torch.nn.utils.parametrizations.weight_norm(module)
            break
    return model


CHANGES = {
    function.__name__: function
    for function in (
        drop_layer,
        add_layer,
        fresh_layer,
        share_layer,
        new_list,
        other_encoder,
        other_query,
        other_ffn,
        other_norm,
        lora,
        copied,
        pickled,
        checkpointed,
        encoder_hooked,
        parametrised,
    )
}


def attack_threads(rng: random.Random) -> None:
    """Many calls of one model at the same time, some of which fail."""
    model = stock_model(rng, rng.choice(["bert", "mpnet", "distilbert", "deberta-v2"]), "Model")
    reference = copy.deepcopy(model)
    hf_posenc.unpad(model)
    batches = []
    for _ in range(4):
        mask = random_mask(rng, 4, 30)
        mask[:, 0] = 1
        batches.append({"input_ids": torch.randint(5, 99, (4, 30)), "attention_mask": mask})
    errors = []

    def run(batch):
        try:
            for index in range(3):
                with torch.no_grad():
                    if index == 1:
                        outcome(lambda: model(**{**batch, "input_ids": batch["input_ids"] + 1000}))
                    compare(
                        model(**batch).last_hidden_state,
                        reference(**batch).last_hidden_state,
                        batch["attention_mask"].bool(),
                    )
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(batch,)) for batch in batches]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]


def attack_caches(rng: random.Random) -> None:
    """Decoders that read a text in pieces, beside the whole of it."""
    family = rng.choice([name for name in FAMILIES if name not in ("distilbert", "mpnet")])
    scheme = rng.choice(SCHEME_NAMES)
    backend = rng.choice(["sdpa", "eager"])
    flags = {"is_decoder": True, "attn_implementation": backend}
    cross = rng.random() < 0.3
    if cross:
        flags["add_cross_attention"] = True
    model = tiny.build(scheme, family, "Model", **flags).double()
    batch, length = rng.choice([1, 2, 3]), rng.choice([5, 17, 30, 40])
    ids = torch.randint(5, 99, (batch, length))
    whole = {}
    if cross:
        whole["encoder_hidden_states"] = torch.randn(batch, 7, 32, dtype=torch.float64)
    roberta_like = tiny.FAMILIES[family].family.positions_follow_padding
    with_positions = rng.random() < 0.5
    if with_positions:
        positions = torch.randint(2, 60, (rng.choice([1, batch]), length))
        if rng.random() < 0.5:
            positions = positions.sort(-1).values
    mask = torch.ones(batch, length, dtype=torch.long)
    if rng.random() < 0.5:
        for row in range(1, batch):
            mask[row, : rng.randrange(length - 1)] = 0
    with_mask = rng.random() < 0.7
    if not with_mask:
        mask = torch.ones_like(mask)
    kind = rng.choice(["dynamic", "dynamic", "static", "implicit"])
    note(f"cache {kind}")
    with torch.no_grad():
        full = {"input_ids": ids, "use_cache": False, **whole}
        if with_mask:
            full["attention_mask"] = mask
        if with_positions:
            full["position_ids"] = positions
        eager = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
        expected, right_error = outcome(lambda: eager(**full).last_hidden_state)
        if right_error is not None:
            found, error = outcome(lambda: model(**full))
            if error is None:
                raise Differs(f"eager refuses: {right_error!r}")
            return
        keyword = rng.choice(["cache", "past_key_values"]) if tiny.CACHE == "cache" else "past_key_values"
        cache = None
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=length + rng.choice([0, 5]))
        elif kind == "dynamic":
            cache = DynamicCache(config=model.config)
        if cross and cache is not None:
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
        done, pieces, order = 0, [], torch.arange(batch)
        while done < length:
            step = min(rng.choice([1, 1, 2, 5, 11]), length - done)
            stop = done + step
            part = {"input_ids": ids[order, done:stop], "use_cache": True}
            part |= {name: value[order] for name, value in whole.items()}
            if with_mask:
                part["attention_mask"] = mask[order, :stop]
            if with_positions:
                at = positions if len(positions) == 1 else positions[order]
                part["position_ids"] = at[:, done:stop]
            if cache is not None:
                part[keyword] = cache
            output = model(**part)
            cache = getattr(output, tiny.CACHE)
            states = output.last_hidden_state
            compare(states, expected[order, done:stop], mask[order, done:stop].bool())
            done = stop
            if kind != "static" and rng.random() < 0.3 and done > 3 and not cross:
                back = rng.randrange(1, done)
                cache.crop(-back)
                done -= back
                note("cropped")
                if len(pieces) > 5:
                    break
                pieces.append(back)
            if batch > 1 and rng.random() < 0.3 and not cross:
                shuffle = torch.randint(0, batch, (batch,))
                cache.reorder_cache(shuffle)
                order = order[shuffle]
                note("reordered")
        _ = roberta_like


def big_tables(rng, scheme: str):
    """A model whose projected tables are of the size that is told by a product."""
    sizes = {"hidden_size": 256, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 300}
    return tiny.build(scheme, "bert", "Model", **sizes)


def attack_kept_tables(rng: random.Random) -> None:
    """Parameters that change by every means: the output follows."""
    kind = rng.choice(["variant", "variant", "big", "deberta", "deberta-v2", "big deberta", "big deberta-v2", "mpnet"])
    if kind == "variant":
        model = tiny.build(rng.choice(["deberta", "transformer_xl", "tupe", "tupe+t5", "absolute+deberta"]))
    elif kind == "big":
        model = big_tables(rng, rng.choice(["deberta", "transformer_xl", "tupe"]))
    elif kind == "mpnet":
        model = stock_model(rng, "mpnet", "Model")
        model.set_attn_implementation("sdpa")
    else:
        family = kind.removeprefix("big ")
        config = deberta_config(rng, family)
        if kind.startswith("big"):
            config.hidden_size, config.max_relative_positions, config.position_buckets = 256, 200, -1
            config.embedding_size = 256
            config.pooler_hidden_size = 256
            config.num_hidden_layers = 1
        from transformers import DebertaModel, DebertaV2Model

        model = randomised({"deberta": DebertaModel, "deberta-v2": DebertaV2Model}[family](config))
        model.set_attn_implementation("sdpa")
    model = model.to(rng.choice([torch.float32, torch.float64, torch.float64, torch.float16])).eval()
    note(f"kept in {model.dtype}, {kind}")
    length = rng.choice([1, 3, 20, 60])
    batch = {"input_ids": torch.randint(5, 99, (2, length))}
    if length > 1:
        batch["attention_mask"] = torch.ones(2, length, dtype=torch.long)
        batch["attention_mask"][1, length // 2 :] = 0
    change = None
    for _ in range(rng.choice([2, 4, 6])):
        with torch.no_grad():
            found = model(**batch).last_hidden_state
            model(**batch)
            with cache_projections(False):
                expected = copy.deepcopy(model)(**batch).last_hidden_state
        tolerance = {torch.float32: 1e-4, torch.float64: 1e-8, torch.float16: 0.02}.get(found.dtype, 0.1)
        try:
            compare(found, expected, None, tolerance)
        except Differs as error:
            raise Differs(f"{kind} after {change.__name__ if change else 'nothing'}: {error}") from None
        change = rng.choice(WRITES)
        note(f"write {change.__name__}")
        change(rng, model, batch)


def targets(model):
    return [(name, p) for name, p in model.named_parameters() if p.dim() and p.numel()]


def by_data(rng, model, batch):
    for _name, p in targets(model):
        if rng.random() < 0.5:
            p.data.add_(torch.randn_like(p) * 0.3)


def by_data_slice(rng, model, batch):
    for _name, p in targets(model):
        if rng.random() < 0.5:
            p.data[rng.randrange(len(p))] += 0.5


def by_numpy(rng, model, batch):
    for _name, p in targets(model):
        if p.dtype in (torch.float32, torch.float64) and rng.random() < 0.5:
            view = p.detach().numpy()
            view[rng.randrange(len(view))] *= -1.5


def by_swap(rng, model, batch):
    """Rows exchanged behind the back: sums stay."""
    for _name, p in targets(model):
        if len(p) > 1:
            first, second = rng.sample(range(len(p)), 2)
            p.data[[first, second]] = p.data[[second, first]]


def by_column_swap(rng, model, batch):
    for _name, p in targets(model):
        if p.dim() == 2 and p.shape[1] > 1:
            first, second = rng.sample(range(p.shape[1]), 2)
            p.data[:, [first, second]] = p.data[:, [second, first]]


def by_optimizer(rng, model, batch):
    kind = rng.choice([torch.optim.SGD, torch.optim.AdamW])
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model(**batch).last_hidden_state.pow(2).sum().backward()
    optimizer.step()
    model.zero_grad()


def by_trained_step(rng, model, batch):
    model.train()
    by_optimizer(rng, model, batch)
    model.eval()


def by_load(rng, model, batch):
    state = {
        name: torch.randn_like(value) * 0.3 if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=rng.random() < 0.5)


def by_storage(rng, model, batch):
    for _name, p in targets(model):
        if rng.random() < 0.5:
            p.data = (torch.randn_like(p) * 0.3).contiguous()


def by_set(rng, model, batch):
    with torch.no_grad():
        for _name, p in targets(model):
            if rng.random() < 0.3:
                p.set_(torch.randn_like(p) * 0.3)


def by_negation(rng, model, batch):
    with torch.no_grad():
        for _name, p in targets(model):
            if rng.random() < 0.5:
                p.neg_()


def by_module(rng, model, batch):
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and rng.random() < 0.3:
                new = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                setattr(module, name, new.to(child.weight.dtype).eval())


def by_embedding(rng, model, batch):
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child) is nn.Embedding and rng.random() < 0.5:
                new = nn.Embedding(child.num_embeddings, child.embedding_dim, child.padding_idx)
                setattr(module, name, new.to(child.weight.dtype).eval())


def by_eps(rng, model, batch):
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = rng.choice([1e-12, 1e-2, 1.0])


def by_dtype(rng, model, batch):
    model.to(rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16]))


def by_length(rng, model, batch):
    length = rng.choice([2, 7, 30, 55])
    batch["input_ids"] = torch.randint(5, 99, (2, length))
    batch.pop("attention_mask", None)


def by_inference_mode(rng, model, batch):
    with torch.inference_mode():
        model(**batch)
    by_data(rng, model, batch)


def by_forward(rng, model, batch):
    """A forward of one's own on one module."""
    for module in model.modules():
        if type(module) is nn.LayerNorm and rng.random() < 0.3:
            shift = rng.random()
            inner = type(module).forward
            module.forward = lambda states, module=module, inner=inner, shift=shift: inner(module, states) + shift


def by_hook(rng, model, batch):
    for module in model.modules():
        if type(module) in (nn.Linear, nn.LayerNorm, nn.Embedding) and rng.random() < 0.1:
            module.register_forward_hook(twice)


def twice(module, args, output):
    return output * 1.5


def by_parametrisation(rng, model, batch):
    for module in list(model.modules()):
        if type(module) is nn.Linear and rng.random() < 0.2:
            torch.nn.utils.parametrizations.weight_norm(module)


def by_pruning(rng, model, batch):
    from torch.nn.utils import prune

    for module in list(model.modules()):
        if type(module) is nn.Linear and rng.random() < 0.3:
            prune.random_unstructured(module, "weight", amount=0.5)


WRITES = [
    by_data, by_data_slice, by_numpy, by_swap, by_column_swap, by_optimizer, by_trained_step, by_load, by_storage, by_set,
    by_negation, by_module, by_embedding, by_eps, by_dtype, by_length, by_inference_mode, by_forward, by_hook, by_pruning,
]  # fmt: skip


def attack_stock_attention(rng: random.Random) -> None:
    """Stock DeBERTa and MPNet: sdpa beside eager."""
    family = rng.choice([*DEBERTAS, "mpnet"])
    heads = ["Model", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "ForQuestionAnswering"]
    head = rng.choice(heads)
    model = stock_model(rng, family, head)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    _, error = outcome(lambda: model.set_attn_implementation("sdpa"))
    if error is not None:
        note("sdpa refused")
        return
    batch, length = rng.choice([1, 2, 5]), rng.choice([1, 2, 9, 40, 60])
    if length == 60 and family == "mpnet":
        length = 55
    arguments, mask = random_inputs(rng, model.config, head, batch, length)
    if rng.random() < 0.3:
        mask[0] = 0
        arguments["attention_mask"] = mask.clone()
    given = arguments.get("attention_mask")
    if given is not None and (given.dim() == 4 or given.shape[-1] == 1) and length > 1:
        arguments["attention_mask"] = (
            mask  # eager adds a boolean mask of pairs as a number, and masks queries by columns
        )
    if family in DEBERTAS and getattr(model.config, "type_vocab_size", 0) < 2:
        arguments.pop("token_type_ids", None)
    check_same(model, reference, arguments, None, rng.random() < 0.7, rng.randrange(1000), tolerance=1e-6)


def attack_transforms(rng: random.Random) -> None:
    """jvp, torch.func, fake and meta tensors."""
    kind = rng.choice(["variant", "unpad", "sdpa"])
    if kind == "variant":
        family = rng.choice(FAMILIES)
        model = tiny.build(
            rng.choice(SCHEME_NAMES), family, "Model", attn_implementation=rng.choice(["sdpa", "eager"])
        )
        model = model.double()
        reference = copy.deepcopy(model)
        reference.set_attn_implementation("eager")
        reference.config.unpad = False
    else:
        family = rng.choice([*DEBERTAS, "mpnet"]) if kind == "sdpa" else rng.choice([*FAMILIES, *DEBERTAS])
        model = stock_model(rng, family, "Model")
        reference = copy.deepcopy(model)
        reference.set_attn_implementation("eager")
        if kind == "sdpa":
            model.set_attn_implementation("sdpa")
        else:
            hf_posenc.unpad(model)
            model.set_attn_implementation("eager")
    batch, length = 4, rng.choice([6, 30, 50])
    ids, mask = torch.randint(5, 99, (batch, length)), random_mask(rng, batch, length)
    mask[:, 0] = 1
    kept = mask.bool()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    some = rng.sample(sorted(parameters), min(6, len(parameters)))
    some = {name: parameters[name] for name in some}
    how = rng.choice(["jvp", "dual", "grad", "functional_call", "vmap", "fake", "meta", "jacrev", "hvp"])
    note(f"transform {how} {kind}")

    def of(each):
        def function(chosen):
            output = torch.func.functional_call(each, chosen, kwargs={"input_ids": ids, "attention_mask": mask})
            return where(output[0], kept)

        return function

    # PyTorch's kernel for CPUs refuses, under torch.func, a mask that requires a gradient outside of it.
    if rng.random() < 0.9:
        for each in (model, reference):
            each.requires_grad_(False)
    tangents = {name: torch.randn_like(p) for name, p in some.items()}

    def run(each):
        function = of(each)
        if how == "jvp":
            return torch.func.jvp(function, (some,), (tangents,))
        if how == "dual":
            with torch.autograd.forward_ad.dual_level():
                duals = {n: torch.autograd.forward_ad.make_dual(p, tangents[n]) for n, p in some.items()}
                return tuple(torch.autograd.forward_ad.unpack_dual(function(duals)))
        if how == "grad":
            return torch.func.grad(lambda chosen: function(chosen).pow(2).sum())(some)
        if how == "functional_call":
            return function({name: p * 1.1 for name, p in some.items()})
        if how == "vmap":
            stacked = {name: torch.stack([p, p * 1.1]) for name, p in some.items()}
            return torch.func.vmap(function)(stacked)
        if how == "jacrev":
            return torch.func.jacrev(lambda chosen: function(chosen).pow(2).sum((1, 2)))(some)
        if how == "hvp":
            leaves = [p.clone().requires_grad_() for p in some.values()]
            value = function(dict(zip(some, leaves))).pow(2).sum()
            first = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
            total = sum((g * t).sum() for g, t in zip(first, tangents.values()) if g is not None)
            return [g for g in torch.autograd.grad(total, leaves, allow_unused=True) if g is not None]
        if how == "fake":
            from torch._subclasses import FakeTensorMode

            with FakeTensorMode(allow_non_fake_inputs=True):
                return tuple(each(input_ids=torch.ones_like(ids), attention_mask=torch.ones_like(mask))[0].shape)
        clone = copy.deepcopy(each).to("meta")
        return tuple(clone(input_ids=ids.to("meta"), attention_mask=mask.to("meta"))[0].shape)

    found, error = outcome(lambda: run(model))
    expected, right_error = outcome(lambda: run(reference))
    if (error is None) != (right_error is None):
        if how == "hvp":
            note(f"hvp alone refused: {str(error)[:60]}")
            return
        if error is None:
            note(f"eager alone refuses {how}")
            return
        raise Differs(f"{kind} {how}: error {error!r} for {right_error!r}")
    if error is None:
        if how in ("fake", "meta"):
            if found != expected:
                raise Differs(f"{kind} {how}: {found} for {expected}")
        else:
            compare(found, expected, None, 1e-6)


AREAS = {
    "variants": (attack_variants, 5),
    "stock_unpad": (attack_stock_unpad, 6),
    "threads": (attack_threads, 0.5),
    "caches": (attack_caches, 3),
    "kept_tables": (attack_kept_tables, 3),
    "stock_attention": (attack_stock_attention, 4),
    "transforms": (attack_transforms, 2),
}


def with_thresholds(attack: Callable[[random.Random], None], rng: random.Random) -> None:
    """An attack with packing and saving at sizes as small as these, mostly."""
    packing.FEWEST_PLACES, packing.SMALLEST_SHARE = rng.choice([(32, 0.08), (1, 0.01), (1, 0.01)])
    packing.FEWEST_SAVED = rng.choice([1 << 16, 1])
    attack(rng)


if __name__ == "__main__":
    areas = {area: (partial(with_thresholds, attack), share) for area, (attack, share) in AREAS.items()}
    loop.main(__doc__, areas, cases=500)
