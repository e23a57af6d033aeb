"""The `position_*` flags as command-line arguments."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass
class PositionArguments:
    """For `HfArgumentParser`: `--position_scheme` and its companions; what is not given is left to the scheme."""

    position_scheme: str = field(
        default="absolute+t5", metadata={"help": "A scheme's name, or several joined by '+'; the README lists them."}
    )
    position_combine: Literal["add", "concat", "gate", "attention"] | None = field(
        default=None, metadata={"help": "How an embedding-level scheme joins the word embedding."}
    )
    position_every_layer: bool | None = field(
        default=None, metadata={"help": "Add embedding-level positions again before every layer but the first."}
    )
    position_init: Literal["silent", "reference"] | None = field(
        default=None, metadata={"help": "Start as the checkpoint computes, or as the paper does."}
    )
    position_form: Literal["checkpoint", "paper"] | None = field(
        default=None, metadata={"help": "deberta, tupe: keep a checkpoint's content score, or the published formula."}
    )
    position_base: float | None = field(
        default=None, metadata={"help": "sinusoidal, transformer_xl, rope: base of the wavelengths."}
    )
    position_layout: Literal["interleaved", "halves"] | None = field(
        default=None, metadata={"help": "sinusoidal, rope: order of sines and cosines, or of rotated pairs."}
    )
    position_scale: float | None = field(default=None, metadata={"help": "sinusoidal: amplitude at the start."})
    position_rope_scaling: str | None = field(
        default=None, metadata={"help": "rope: transformers' RoPE scaling, as a JSON object."}
    )
    position_buckets: int | None = field(default=None, metadata={"help": "t5, deberta: number of buckets."})
    position_max_distance: int | None = field(
        default=None, metadata={"help": "t5, deberta: distance at which the last bucket begins."}
    )
    position_per_layer: bool | None = field(default=None, metadata={"help": "t5: a table per layer."})
    position_clip: int | None = field(
        default=None, metadata={"help": "relative: largest distance with an embedding of its own."}
    )
    position_values: bool | None = field(default=None, metadata={"help": "relative: also on the value side."})
    position_attention_types: list[str] | None = field(
        default=None, metadata={"help": "deberta: which of c2p, p2c and p2p."}
    )
    position_share_projections: bool | None = field(
        default=None, metadata={"help": "deberta: reuse the content projections for positions."}
    )
    position_norm: bool | None = field(default=None, metadata={"help": "deberta: LayerNorm on the relative table."})

    def flags(self) -> dict[str, Any]:
        """The flags that were given, as `from_pretrained` takes them.

        Raises:
            ValueError: `--position_rope_scaling` is not JSON.
        """
        given = {flag: value for flag, value in asdict(self).items() if value is not None}
        if self.position_rope_scaling is not None:
            try:
                given["position_rope_scaling"] = json.loads(self.position_rope_scaling)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"position_rope_scaling must be a JSON object, got {self.position_rope_scaling!r}: {error}"
                ) from error
        return given
