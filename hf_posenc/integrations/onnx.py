"""Models as ONNX, written for ONNX Runtime on CPUs.

`torch.onnx.export` records a model whose attention is written for the purpose: ONNX Runtime's own operator for attention
(`com.microsoft.MultiHeadAttention`, with the position terms as its bias), and the scores of tables by distance as a function
of a few nodes that is in the file ([`_score_function`]). What depends on parameters alone is computed then, and is in the file as numbers.
"""

import functools
import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import inspection
from ..files import check_file, whole_file
from ..modeling.kernels.attention import eager_position_attention, score_bias
from ..modeling.kernels.blockwise import Term
from ..modeling.kernels.masks import windowed
from ..modeling.kernels.packing import padding_is_read
from ..modeling.models.self_attention import PositionSelfAttention
from ..modeling.schemes.positions import allowed
from ..modeling.schemes.terms import RelativeTerm
from ..variants import CONFIG_CLASSES, saved_class
from ..weights import load_whole
from .stock_attention import deberta, mpnet
from .stock_attention.attention import TokenMask


OPSET = 20
EXPORTER = "torch.onnx.export, dynamo"
LIBRARIES = ("onnx", "onnxruntime", "onnxscript")
# Where the model has no table that ends.
LONGEST = 100_000
# Of a kind of attention, in transformers' tables, while a model is exported.
IMPLEMENTATION = "hf_posenc_onnx"
# Own functions in the file, and ONNX Runtime's operators.
OWN, CONTRIB = "hf_posenc", "com.microsoft"
# Stock models without a variant whose attention is replaced here; the families with variants are the rest.
OF_THEIR_OWN = ("deberta", "deberta-v2")
# The score of what is not attended to.
LOWEST = torch.finfo(torch.float32).min
# Parity: batch x length, and how far results may be apart relative to their size.
SHAPES, TOLERANCE = ((1, 2), (1, 11), (3, 40), (2, 150), (2, 300)), 1e-4
# A file of ONNX holds so many bytes.
LARGEST = (1 << 31) - 1


class Exported(NamedTuple):
    """What was written.

    Attributes:
        file: where it is.
        inputs, outputs: their names.
        longest: number of tokens at which a table ends, or None.
        difference: largest difference from PyTorch's results.
        metadata: what the file itself says of its making.
    """

    file: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    longest: int | None
    difference: float
    metadata: dict[str, str]

    def __str__(self) -> str:
        length = "any length" if self.longest is None else f"up to {self.longest} tokens"
        return (
            f"{self.file}: {', '.join(self.inputs)} -> {', '.join(self.outputs)}; any batch, {length}; "
            f"opset {OPSET}; largest difference from PyTorch {self.difference:.1e}"
        )


def export(checkpoint: str | Path, out: str | Path, revision: str | None = None) -> Exported:
    """Write a checkpoint as ONNX.

    Args:
        checkpoint: a folder or a name on the Hub; a variant, or a stock model of the same families or DeBERTa (v1, v2, v3).
        out: the file to write; whole or not at all.
        revision: branch, tag or commit on the Hub.

    Raises:
        ImportError: `onnx`, `onnxruntime` or `onnxscript` is not installed (extra `export`).
        FileExistsError: the file exists.
        OSError: there is no such checkpoint, or the file cannot be written.
        ValueError: the checkpoint is of another kind, or ONNX Runtime computes something else than PyTorch does.
    """
    inspection.check_named(out, "the file to write")
    out = Path(out)
    if out.is_file():
        raise FileExistsError(f"{out} exists: name another file, or remove it")
    check_file(out)
    check_installed()
    inspection.check_exists(str(checkpoint), revision)
    config = _config_of(str(checkpoint), revision)
    check_config(config)
    model = load_whole(_class_of(config), checkpoint, revision=revision, dtype=torch.float32)
    return export_model(model, out)


def _config_of(checkpoint: str, revision: str | None) -> PreTrainedConfig:
    """The config of what is exported; it names the class that the weights are of."""
    entries = inspection.read_entries(checkpoint, revision)
    _check_type(entries.get("model_type"))
    if entries["model_type"] not in OF_THEIR_OWN:
        return inspection.load_config(checkpoint, revision, download=True)
    with inspection.config_of(checkpoint):
        inspection.check_sizes(checkpoint, entries, transformers.CONFIG_MAPPING[entries["model_type"]](), None)
        config = transformers.AutoConfig.from_pretrained(checkpoint, revision=revision)
        inspection.name_as_weights(config, _class_of(config), checkpoint, revision, download=True)
        return config


def check_installed() -> None:
    """Raise ImportError where a library that exporting needs is not installed."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"exporting needs {', '.join(missing)}: pip install 'hf_posenc[export]'")
    if not hasattr(torch.onnx, "ops"):
        raise ImportError(f"exporting needs torch 2.8 or newer, this is {torch.__version__}")


def check_config(config: PreTrainedConfig) -> None:
    """Raise ValueError for a model that is not exported."""
    _check_type(config.model_type)
    if getattr(config, "is_decoder", False):
        raise ValueError("the model is a decoder (is_decoder); only encoders are exported")
    if config.model_type == "deberta":
        deberta.refuse_options(config)


def _check_type(model_type: Any) -> None:
    known = (*CONFIG_CLASSES, *OF_THEIR_OWN)
    if model_type not in known:
        raise ValueError(f"model type {model_type!r} is not exported; these are: {', '.join(known)}")


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if config.model_type in CONFIG_CLASSES:
        return saved_class(config)
    [name] = (config.architectures or [])[:1] or [type(config).__name__.removesuffix("Config") + "Model"]
    found = getattr(transformers, name, None)
    if found is None or getattr(found, "config_class", None) is not type(config):
        raise ValueError(f"the checkpoint is a {name}, which is no class of {config.model_type} in transformers")
    return found


class _Outputs(nn.Module):
    """A model as a function of tensors; of a base model the last hidden state, of a head all that it answers."""

    def __init__(self, model: PreTrainedModel, inputs: tuple[str, ...], outputs: tuple[str, ...]):
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answers = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(answers[name] for name in self.outputs)


def export_model(model: PreTrainedModel, out: Path) -> Exported:
    """[`export`] of a model, which is left as it was, but for eval mode while this runs."""
    check_installed()
    check_config(model.config)
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ValueError("the model is exported in float32: load it with dtype=torch.float32")
    if sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()) > LARGEST:
        raise ValueError("the model has more than 2 GiB, which is as much as a file of ONNX holds")
    trains = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _export(model, out)
    finally:
        model.train(trains)


def _export(model: PreTrainedModel, out: Path) -> Exported:
    import onnx

    longest = _longest(model.config)
    examples = _example(model, 2, 10)
    answers = model(**examples)
    has_head = model.base_model is not model
    names = [name for name, value in answers.items() if isinstance(value, torch.Tensor)]
    outputs = tuple(names) if has_head else ("last_hidden_state",)
    module = _Outputs(model, tuple(examples), outputs)
    try:
        program = _trace(module, examples, longest)
    except Exception as error:  # of whatever kind the exporter has, some of them a page long
        raise ValueError(f"the export of {type(model).__name__} failed: {_first_line(error)}") from error
    # Shapes between nodes are those of the example where this module's operators begin, and ONNX Runtime would believe them.
    del program.graph.value_info[:]
    merge_equal_nodes(program)
    fold_constants(program)
    for function in _functions():
        if any(node.op_type == function.name for node in program.graph.node):
            program.functions.append(function)
    _declare_domains(program)
    metadata = _describe(model, program)
    onnx.helper.set_model_props(program, metadata)
    if program.ByteSize() > LARGEST:
        raise ValueError("the model and its tables have more than 2 GiB, which is as much as a file of ONNX holds")
    with whole_file(out) as file:
        onnx.save_model(program, file)
        difference = check_parity(module, file, longest)
        metadata["largest difference from PyTorch"] = f"{difference:.1e}"
        onnx.helper.set_model_props(program, metadata)
        onnx.save_model(program, file)
    return Exported(out, tuple(examples), outputs, longest, difference, metadata)


def _first_line(error: Exception) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def _longest(config: PreTrainedConfig) -> int | None:
    if config.model_type in CONFIG_CLASSES:
        return inspection.longest_sequence(config)
    return config.max_position_embeddings if getattr(config, "position_biased_input", True) else None


def _example(
    model: PreTrainedModel, batch: int, length: int, seed: int = 0, side: str = "right"
) -> dict[str, torch.Tensor]:
    """Inputs of a model; every row but the first is padded, at its end or, with "left", before it."""
    config = model.config
    shape = (batch, 2, length) if type(model).__name__.endswith("ForMultipleChoice") else (batch, length)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, shape, generator=generator)
    mask = torch.ones_like(ids)
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    # The id of padding stands for padding alone: some families number positions by it.
    ids[ids == pad] = (pad + 1) % config.vocab_size
    for row in range(1, batch):
        padding = min(3 * row, length - 1)
        places = slice(length - padding, length) if side == "right" else slice(0, padding)
        mask[row, ..., places] = 0
        ids[row, ..., places] = pad
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.randint(0, config.type_vocab_size, shape, generator=generator)
    return inputs


def _trace(module: _Outputs, examples: dict[str, torch.Tensor], longest: int | None):
    """The model as `torch.onnx.export` writes it, with this module's attention."""
    names = ("batch", "choices") if examples["input_ids"].dim() == 3 else ("batch",)
    shape: dict[int, Any] = {at: torch.export.Dim(name) for at, name in enumerate(names)}
    shape[len(names)] = torch.export.Dim("length", max=longest or LONGEST)
    with warnings.catch_warnings(), attention_for_onnx(module.model):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            tuple(examples.values()),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[*examples],
            output_names=[*module.outputs],
            dynamic_shapes=((shape,) * len(examples),),
        )
    return program.model_proto


@contextmanager
def attention_for_onnx(model: nn.Module) -> Iterator[None]:
    """Within, what a model's attention computes is recorded in operators of ONNX Runtime."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend_without_terms)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask_of_tokens)
    replaced = [
        (PositionSelfAttention, "_attend", _attend_with_terms),
        (deberta, "self_attend", _self_attend),
        (mpnet, "self_attend", _self_attend),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    is_hooked = type(model.base_model).__name__ in ("DebertaModel", "DebertaV2Model", "MPNetModel")
    try:
        for config in configs.values():
            config._attn_implementation = "sdpa" if is_hooked else IMPLEMENTATION
        for place, name, function in replaced:
            setattr(place, name, function)
        yield
    finally:
        for place, name, function in originals:
            setattr(place, name, function)
        for key, config in configs.items():
            config._attn_implementation = before[key]
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            functions._global_mapping.pop(IMPLEMENTATION, None)


def _mask_of_tokens(*, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
    """The mask of tokens, (batch, 1, 1, length)."""
    return None if attention_mask is None else attention_mask[:, None, None, :].bool()


def _attend_without_terms(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return multi_head_attention(query, key, value, attention_mask, None, scaling), None


def _attend_with_terms(self, content_query, key, value, attention_mask, query, terms, window, kwargs):
    """`PositionSelfAttention._attend`."""
    values = tuple(term for term in terms if isinstance(term, RelativeTerm) and term.value_table is not None)
    bias = _score_bias(query, key, terms, attention_mask)
    if window is not None:
        attention_mask = windowed(attention_mask, window, query.shape[2], key.shape[2], query.device)
    if values:
        settings = {"position_bias": bias, "value_terms": values}
        return eager_position_attention(self, content_query, key, value, attention_mask, self.scaling, **settings)
    if window is not None:
        # The operator takes a mask of tokens alone; one of pairs is a bias.
        unseen = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, LOWEST)
        bias, attention_mask = unseen if bias is None else bias + unseen, None
    return multi_head_attention(content_query, key, value, attention_mask, bias, self.scaling), None


def _self_attend(implementation, module, query, key, value, terms, mask, scaling, dropout):
    """[`self_attend`] of stock DeBERTa and MPNet."""
    words = None
    if isinstance(mask, TokenMask):
        words = mask.given.bool()
        mask = words[:, None, None, :]
    if isinstance(mask, torch.Tensor):
        mask = allowed(mask[:, :, :1])  # of pairs, as transformers makes it of tokens; additive in older ones
    output = multi_head_attention(query, key, value, mask, _score_bias(query, key, terms, mask), scaling)
    return (output if words is None else _with_padding(output, value, words)).flatten(2)


def _with_padding(output: torch.Tensor, value: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """DeBERTa's padding attends to nothing: every key has the same weight. Heads read it where it stands on the left."""
    return torch.where(words[..., None, None], output, value.mean(2)[:, None])


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """ONNX Runtime's operator.

    Args:
        query, key, value: (batch, heads, length, head_dim).
        mask: (batch, 1, 1, length), True for what is attended to.
        bias: (batch or 1, heads or 1, length, length).

    Returns:
        (batch, length, heads, head_dim).
    """
    heads, width = query.shape[1], query.shape[3]
    states = [states.transpose(1, 2).flatten(2) for states in (query, key, value)]
    tokens = None if mask is None else mask[:, 0, 0].to(torch.int32)
    attributes = {"num_heads": heads, "scale": float(scaling), "mask_filter_value": LOWEST}
    output = torch.onnx.ops.symbolic(
        f"{CONTRIB}::MultiHeadAttention",
        [*states, None, tokens, bias],
        attributes,
        dtype=query.dtype,
        shape=states[0].shape,
        version=1,
    )
    return output.unflatten(2, (heads, width))


def _score_bias(
    query: torch.Tensor, key: torch.Tensor, terms: list[Term], mask: torch.Tensor | None
) -> torch.Tensor | None:
    """[`score_bias`], with tables by distance in few nodes."""
    parts, others = [], []
    for term in terms:
        if not isinstance(term, RelativeTerm) or term.rows.dim() != 1:
            others.append(term)
            continue
        parts += _scores(query, key, term, mask)
        if term.bias is not None:
            others.append(RelativeTerm(term.rows, bias=term.bias))
    rest = score_bias(query, key, others)
    parts += [] if rest is None else [rest]
    return functools.reduce(torch.add, parts) if parts else None


def _scores(
    query: torch.Tensor, key: torch.Tensor, term: RelativeTerm, mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """Products with a term's tables, (batch, heads, length, length)."""
    inputs = {}
    if term.query_table is not None:
        inputs["Query"] = term.biased_query(query), term.query_table
    if term.key_table is not None:
        inputs["Key"] = key, term.key_table
    if not inputs:
        return []
    tensors = [tensor.contiguous() for pair in inputs.values() for tensor in pair]
    shape = (*query.shape[:3], key.shape[2])
    # Inputs that are the same in all layers make the same rows in all layers.
    tokens = query[:, :1, :, :1].transpose(2, 3) if mask is None else mask
    like = [tokens, query.new_zeros(query.shape[1]), query.new_zeros(tensors[1].shape[-2])]
    symbolic = functools.partial(torch.onnx.ops.symbolic, shape=shape, version=1)
    pair_rows = symbolic(f"{OWN}::{PAIR_ROWS}", [term.rows, *like], dtype=torch.int32)
    name = f"{OWN}::{''.join(inputs)}Scores"
    return [symbolic(name, [term.rows, pair_rows, *tensors], dtype=query.dtype)]


KINDS = (("Query",), ("Key",), ("Query", "Key"))
PAIR_ROWS = "PairRows"


def _node(kind: str, inputs: str, outputs: str, domain: str = "", **attributes):
    from onnx import helper

    return helper.make_node(kind, inputs.split(), outputs.split(), domain=domain, **attributes)


def _constant(name: str, *values: int, scalar: bool = False):
    from onnx import TensorProto, helper

    tensor = helper.make_tensor(name, TensorProto.INT64, [] if scalar else [len(values)], values)
    return helper.make_node("Constant", [], [name], value=tensor)


def _choice(output: str, kind: int, short: list, long: list):
    """An `If` of two lists of nodes, whose last ones make the result: where the distances are no more than the rows of the table, or more."""
    from onnx import helper

    branches = {
        f"{name}_branch": helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(nodes[-1].output[0], kind, None)]
        )
        for name, nodes in (("then", short), ("else", long))
    }
    return helper.make_node("If", ["is_short"], [output], **branches)


def _function(name: str, inputs: list[str], output: str, nodes: list):
    from onnx import helper

    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_function(OWN, name, inputs, [output], nodes, opsets)


def _is_short(table: str, axis: int) -> list:
    """Nodes that say whether twice the length is no more than the rows of a table, given `length`."""
    sizes = {"start": axis} if axis == -1 else {"start": axis, "end": axis + 1}
    return [
        _constant("two", 2),
        _node("Shape", table, "table_rows", **sizes),
        _node("Mul", "length two", "width"),
        _node("LessOrEqual", "width table_rows", "fits"),
        _node("Squeeze", "fits", "is_short"),
    ]


def _pair_rows_function():
    """`PairRows`: the row of each pair, int32 (batch, heads, length, length), where [`_score_function`] gathers; else a 0.

    Inputs: rows (2 · length - 1,), tokens (batch, 1, 1, length), per_head (heads,), per_row (rows of the table,).
    """
    from onnx import TensorProto

    nodes = [_node("Shape", "tokens", "length", start=3, end=4), *_is_short("per_row", -1)]
    nothing = [_constant("none", 0), _node("Cast", "none", "no_rows", to=TensorProto.INT32)]
    pairs = [
        _constant("zero", 0),
        _constant("one", 1),
        _constant("scalar_zero", 0, scalar=True),
        _constant("scalar_one", 1, scalar=True),
        _node("Squeeze", "length", "scalar_length"),
        _node("Range", "scalar_zero scalar_length scalar_one", "places"),
        _node("Unsqueeze", "places one", "queries"),
        _node("Unsqueeze", "places zero", "keys"),
        _node("Sub", "keys queries", "distances"),
        _node("Sub", "length one", "shift"),
        _node("Add", "distances shift", "at"),
        _node("Cast", "rows", "narrow_rows", to=TensorProto.INT32),
        _node("Gather", "narrow_rows at", "rows_of_pairs", axis=0),
        _node("Shape", "tokens", "batch", start=0, end=1),
        _node("Shape", "per_head", "heads"),
        _node("Concat", "batch heads length length", "sizes", axis=0),
        _node("Expand", "rows_of_pairs sizes", "all_rows"),
    ]
    nodes.append(_choice("pair_rows", TensorProto.INT32, nothing, pairs))
    return _function(PAIR_ROWS, ["rows", "tokens", "per_head", "per_row"], "pair_rows", nodes)


def _score_function(kinds: tuple[str, ...]):
    """The function of ONNX that computes a term's scores: `QueryScores`, `KeyScores`, `QueryKeyScores`.

    Where the table has as many rows as there are distances, it is laid out by distance, multiplied with, and the products are moved by the
    relative shift: a line of 2 · length numbers, read on as if it had one number less. With more distances than rows, products with
    the whole table are gathered per pair.
    """
    from onnx import TensorProto

    first = kinds[0].lower()
    nodes = [
        _constant("zero", 0),
        _constant("one", 1),
        _constant("minus_one", -1),
        _constant("large", 1 << 62),
        _node("Shape", first, "length", start=2, end=3),
        *_is_short(f"{first}_table", -2),
        _node("Sub", "length one", "shift"),
    ]
    shifted = [
        _constant("flat", 0, 0, -1),
        _constant("leading", 0, 0),
        _constant("small", -(1 << 62)),
        _node("Concat", "leading length minus_one", "skewed", axis=0),
    ]
    gathered = []
    ends: dict[str, list[str]] = {"shifted": [], "gathered": []}
    for kind in kinds:
        name, rows = kind.lower(), "rows"
        if kind == "Key":
            # Laid out per key and query: the distances are seen from the other side.
            rows = "reversed_rows"
            shifted.append(_node("Slice", "rows minus_one small zero minus_one", rows))
        shifted += [
            # A row once more, so that lines are even; nobody reads what comes of it.
            _node("Slice", "rows zero one zero", f"{name}_end"),
            _node("Concat", f"{rows} {name}_end", f"{name}_rows", axis=0),
            _node("Gather", f"{name}_table {name}_rows", f"{name}_laid", axis=-2),
            _node("FusedMatMul", f"{name} {name}_laid", f"{name}_products", CONTRIB, transB=1),
            _node("Reshape", f"{name}_products flat", f"{name}_line"),
            _node("Slice", f"{name}_line shift minus_one minus_one", f"{name}_cut"),
            _node("Reshape", f"{name}_cut skewed", f"{name}_lines"),
            _node("Slice", f"{name}_lines zero length minus_one", f"{name}_shifted"),
        ]
        if kind == "Key":
            shifted.append(_node("Transpose", "key_shifted", "key_transposed", perm=[0, 1, 3, 2]))
        # (batch, heads, query, rows), or (batch, heads, rows, key): the same pairs find the same rows.
        factors, axis = ("query query_table", -1) if kind == "Query" else ("key_table key", -2)
        gathered += [
            _node("FusedMatMul", factors, f"{name}_by_row", CONTRIB, transB=1),
            _node("GatherElements", f"{name}_by_row pair_rows", f"{name}_gathered", axis=axis),
        ]
        ends["shifted"].append("key_transposed" if kind == "Key" else "query_shifted")
        ends["gathered"].append(f"{name}_gathered")
    for way, branch in (("shifted", shifted), ("gathered", gathered)):
        branch.append(_node("Add" if len(kinds) > 1 else "Identity", " ".join(ends[way]), f"scores_{way}"))
    nodes.append(_choice("scores", TensorProto.FLOAT, shifted, gathered))
    inputs = ["rows", "pair_rows", *(name for kind in kinds for name in (kind.lower(), f"{kind.lower()}_table"))]
    return _function(f"{''.join(kinds)}Scores", inputs, "scores", nodes)


def _functions() -> list:
    return [_pair_rows_function(), *map(_score_function, KINDS)]


def merge_equal_nodes(program) -> None:
    """Let what several layers compute alike be computed once: equal small constants, and equal nodes of equal inputs."""
    graph = program.graph
    renamed: dict[str, str] = {}
    seen: dict[tuple, Any] = {}
    for tensor in graph.initializer:
        if len(tensor.raw_data) <= 64:
            content = type(tensor)()
            content.CopyFrom(tensor)
            content.ClearField("name")
            renamed[tensor.name] = seen.setdefault(("", content.SerializeToString()), tensor.name)
    answers = {output.name for output in graph.output}
    kept = []
    for node in graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = renamed.get(name, name)
        attributes = tuple(sorted(attribute.SerializeToString() for attribute in node.attribute))
        key = node.domain, node.op_type, tuple(node.input), attributes, len(node.output)
        first = seen.setdefault(key, node)
        has_graphs = any(attribute.HasField("g") for attribute in node.attribute)
        if first is node or has_graphs or answers & {*node.output}:
            kept.append(node)
        else:
            renamed.update(zip(node.output, first.output))
    copies = [type(node).FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(copies)


def _declare_domains(program) -> None:
    from onnx import helper

    declared = {entry.domain for entry in program.opset_import}
    program.opset_import.extend(helper.make_opsetid(name, 1) for name in (OWN, CONTRIB) if name not in declared)


def constant_nodes(program) -> list:
    """The nodes of a model's graph that depend on no input, `Constant` left out, in their order."""
    known = {tensor.name for tensor in program.graph.initializer}
    found = []
    for node in program.graph.node:
        names = [name for name in node.input if name]
        if node.op_type == "Constant" or (names and all(name in known for name in names)):
            known.update(node.output)
            if node.op_type != "Constant":
                found.append(node)
    return found


def fold_constants(program) -> None:
    """Compute what depends on no input, by ONNX Runtime, and put the numbers in its place."""
    import onnxruntime
    from onnx import helper, numpy_helper

    graph = program.graph
    folded = constant_nodes(program)
    if not folded:
        return
    own = {id(node) for node in folded}
    made = {name for node in folded for name in node.output if name}
    rest = [node for node in graph.node if id(node) not in own]
    # What subgraphs read has the outer names.
    read = {name for node in rest for name in _names_read(node)} | {output.name for output in graph.output}
    wanted = sorted(made & read)
    constants = [node for node in graph.node if node.op_type == "Constant"]
    outputs = [helper.make_empty_tensor_value_info(name) for name in wanted]
    of_part = {name for node in folded for name in node.input}
    given = [tensor for tensor in graph.initializer if tensor.name in of_part]
    part = helper.make_graph([*constants, *folded], "constants", [], outputs, initializer=given)
    session = onnxruntime.InferenceSession(
        helper.make_model(part, opset_imports=program.opset_import, ir_version=program.ir_version).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    values = session.run(wanted, {})
    del graph.node[:]
    graph.node.extend(rest)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in zip(wanted, values))
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _names_read(node) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _names_read(inner)


def _describe(model: PreTrainedModel, program) -> dict[str, str]:
    """What the file says of its making, beside the largest difference."""
    import onnx
    import onnxruntime

    from .. import __version__

    kinds = [node.op_type for node in program.graph.node]
    contrib = sorted({node.op_type for node in program.graph.node if node.domain == CONTRIB})
    own = sorted(function.name for function in program.functions)
    return {
        "model": type(model).__name__,
        "position_scheme": str(getattr(model.config, "position_scheme", "")),
        "exporter": f"{EXPORTER}; hf_posenc {__version__}, torch {torch.__version__}, onnx {onnx.__version__}",
        "checked by": f"ONNX Runtime {onnxruntime.__version__}",
        "opset": str(OPSET),
        "operators of ONNX Runtime": ", ".join(contrib),
        "functions": ", ".join(own),
        "nodes": str(len(kinds)),
        "constants": "folded",
        "shapes checked": json.dumps(SHAPES),
    }


def check_parity(module: _Outputs, file: Path, longest: int | None) -> float:
    """The largest difference between ONNX Runtime and PyTorch at several shapes, with padding on either side, and at it.

    Raises:
        ValueError: it is too large, relative to the results.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # pybind's, of many kinds
        raise ValueError(f"ONNX Runtime does not load what was exported: {_first_line(error)}") from error
    largest = 0.0
    for seed, (batch, length) in enumerate(SHAPES):
        if longest is not None and length > longest:
            continue
        for side in ("right", "left") if batch > 1 else ("right",):
            largest = max(largest, _difference(module, session, _example(module.model, batch, length, seed, side)))
    return largest


def _difference(module: _Outputs, session, inputs: dict[str, torch.Tensor]) -> float:
    """[`check_parity`] with these inputs."""
    *batch, length = inputs["input_ids"].shape
    shape = f"{' x '.join(map(str, batch))} x {length}"
    token = padding_is_read.set(True)  # computed, as it is in the file
    try:
        expected = module(*inputs.values())
    finally:
        padding_is_read.reset(token)
    try:
        found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    except Exception as error:
        raise ValueError(f"ONNX Runtime fails at {shape}: {_first_line(error)}") from error
    largest = 0.0
    for name, one, other in zip(module.outputs, expected, map(torch.from_numpy, found), strict=True):
        if one.shape != other.shape:
            raise ValueError(f"{name} has shape {tuple(other.shape)} in ONNX, {tuple(one.shape)} in PyTorch")
        difference = (one - other).abs().max().item()
        size = max(1.0, one.abs()[one.abs() < 1e30].max().item())
        if not difference <= TOLERANCE * size:  # also if it is no number
            raise ValueError(
                f"ONNX Runtime computes another {name} than PyTorch at {shape}: {difference:.1e} apart, "
                f"where values reach {size:.1e}; nothing is written"
            )
        largest = max(largest, difference)
    return largest
