"""Models as ONNX, written for ONNX Runtime on CPUs.

`torch.onnx.export` traces a model with a special attention function: it uses ONNX Runtime's own operator
(`com.microsoft.MultiHeadAttention`, with the position terms as its bias), and computes scores of tables by distance with a function
of a few nodes that is saved in the file ([`functions`]). What depends on parameters alone is computed at export, and saved as constants.
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ... import inspection
from ...files import check_file, whole_file
from ...inspection.weights import load_whole
from ...integrations.stock_attention import deberta
from ...modeling.kernels.packing import padding_is_read
from ...variants import CONFIG_CLASSES, saved_class
from .attention import attention_for_onnx
from .graph import CONTRIB, OPSET, add_own_functions, declare_domains, fold_constants, merge_equal_nodes


EXPORTER = "torch.onnx.export, dynamo"
LIBRARIES = ("onnx", "onnxruntime", "onnxscript")
# Where the model has no table that ends.
LONGEST = 100_000
# Original models without position schemes whose attention is replaced here; the families with position schemes are the rest.
OF_THEIR_OWN = ("deberta", "deberta-v2")
# Parity: batch x length, and how far results may be apart relative to their size.
SHAPES, TOLERANCE = ((1, 2), (1, 11), (3, 40), (2, 150), (2, 300)), 1e-4
# A file of ONNX holds so many bytes.
LARGEST = (1 << 31) - 1


class Exported(NamedTuple):
    """An exported model.

    Attributes:
        file: its path.
        inputs, outputs: their names.
        longest: the maximum sequence length in tokens; None if there is none.
        difference: largest difference from PyTorch's results.
        metadata: the metadata in the file: versions, schemes and checks.
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
        checkpoint: a folder or a name on the Hub; a model with or without a position scheme of a supported family, or DeBERTa (v1, v2, v3).
        out: the file to write, atomically.
        revision: branch, tag or commit on the Hub.

    Raises:
        ImportError: `onnx`, `onnxruntime` or `onnxscript` is not installed (extra `export`).
        FileExistsError: the file exists.
        OSError: there is no such checkpoint, or the file cannot be written.
        ValueError: the model cannot be exported, or ONNX Runtime gives other results than PyTorch.
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
        raise ValueError("the model is a decoder (is_decoder); only encoders can be exported")
    if config.model_type == "deberta":
        deberta.refuse_options(config)


def _check_type(model_type: Any) -> None:
    known = (*CONFIG_CLASSES, *OF_THEIR_OWN)
    if model_type not in known:
        raise ValueError(f"model type {model_type!r} cannot be exported; the supported ones are {', '.join(known)}")


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if config.model_type in CONFIG_CLASSES:
        return saved_class(config)
    [name] = (config.architectures or [])[:1] or [type(config).__name__.removesuffix("Config") + "Model"]
    found = getattr(transformers, name, None)
    if found is None or getattr(found, "config_class", None) is not type(config):
        raise ValueError(f"the checkpoint is a {name}, which is not a class of {config.model_type} in Transformers")
    return found


class _Outputs(nn.Module):
    """A model as a function of tensors; of a base model the last hidden state, of a head all that it answers."""

    def __init__(self, model: PreTrainedModel, inputs: tuple[str, ...], outputs: tuple[str, ...]):
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answers = self.model(**dict(zip(self.inputs, tensors, strict=True)), return_dict=True)
        return tuple(answers[name] for name in self.outputs)


def export_model(model: PreTrainedModel, out: Path) -> Exported:
    """[`export`] of a model, which is left as it was, but for eval mode while this runs."""
    check_installed()
    check_config(model.config)
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ValueError("models are exported in float32: load the model with dtype=torch.float32")
    if sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()) > LARGEST:
        raise ValueError("the model has more than 2 GiB, the limit of an ONNX file")
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
    answers = model(**examples, return_dict=True)
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
    add_own_functions(program)
    merge_equal_nodes(program)
    fold_constants(program)
    declare_domains(program)
    metadata = _describe(model, program)
    onnx.helper.set_model_props(program, metadata)
    if program.ByteSize() > LARGEST:
        raise ValueError("the model and its computed constants have more than 2 GiB, the limit of an ONNX file")
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


def _describe(model: PreTrainedModel, program) -> dict[str, str]:
    """What the file says of its making, with the largest difference."""
    import onnx
    import onnxruntime

    from ... import __version__

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
        raise ValueError(f"ONNX Runtime cannot load the exported model: {_first_line(error)}") from error
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
                f"{name} of ONNX Runtime and PyTorch differ at {shape} by {difference:.1e}, "
                f"with values up to {size:.1e}; nothing was written"
            )
        largest = max(largest, difference)
    return largest
