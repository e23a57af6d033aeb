"""How learning rates should follow the tokens of a step: MiniLM converted to `t5`, with as many tokens in larger steps.

    python benchmarks/step_sizes.py --data DATA                    # all that results/step_sizes.json lacks
    python benchmarks/step_sizes.py --data DATA --only 4096:2      # 4,096 tokens a step, twice the rates of the rule

hf_posenc.convert multiplies all its rates by √n where a step has n times 512 tokens. Here they are multiplied by a further factor.
Converted with WikiText-2's validation text, of which every tenth document is held out and measured on: so the test text,
on which conversions are reported, chooses nothing. Core minutes are the processor's time, all stages and measurements counted in.

Writes results/step_sizes.json after each; what is there is left alone unless `--only` names it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import report
import torch
from conversion import TRAINED_LENGTH, decimals
from minilm import packaged_minilm
from transformers.utils import logging

import hf_posenc
from hf_posenc._utils import as_markdown
from hf_posenc.conversion.distillation import Distillation


NAME = "step_sizes"
TOKENS = 3_200_000
# Tokens of a step -> factors beside the rule's.
FACTORS = {512: (1.0, 0.5), 4096: (1.0, 0.5, 2.0), 16384: (1.0, 0.5, 2.0)}
RUNS = {f"{tokens}:{factor:g}": (tokens, factor) for tokens, factors in FACTORS.items() for factor in factors}


def measured(arguments: argparse.Namespace, tokens: int, factor: float) -> dict[str, Any]:
    """The record of a conversion whose rates are the rule's times a factor."""
    by_the_rule = Distillation.rates_by
    began = time.process_time()
    with patch.object(Distillation, "rates_by", lambda self, processes=1: factor * by_the_rule(self, processes)):
        _, found = hf_posenc.convert(
            packaged_minilm(),
            "t5",
            text=[arguments.data / "wikitext2" / "valid.txt"],
            trained_length=TRAINED_LENGTH,
            tokens_per_step=tokens,
            max_tokens=arguments.tokens,
        )
    [row] = [row for row in found.rows if row["stage"] == "distill" and row["length"] == TRAINED_LENGTH]
    return {
        "tokens_per_step": tokens,
        "factor": factor,
        "tokens": found.distillation[-1]["tokens"],
        "steps": found.distillation[-1]["step"],
        "core_seconds": round(time.process_time() - began, 1),
        "threads": torch.get_num_threads(),
        "versions": found.versions,
        **{key: row[key] for key in ("token_cosine", "sentence_cosine", "spearman", "neighbours_kept")},
        "distillation": [
            {"tokens": entry["tokens"], "cosine": round(entry["cosine"], 5)} for entry in found.distillation
        ],
    }


def table(records: list[dict]) -> str:
    """A row for each number of tokens of a step and factor of the rates."""
    header = ["tokens of a step", "rates, times the rule's", "steps", "core minutes", "token cosine", "Spearman"]
    rows = [
        [
            f"{record['tokens_per_step']:,}",
            f"{record['factor']:g}",
            f"{record['steps']:,}",
            decimals(record["core_seconds"] / 60, 1),
            decimals(record["token_cosine"], 4),
            decimals(record["spearman"]),
        ]
        for record in records
    ]
    return as_markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2")
    parser.add_argument("--only", nargs="+", choices=RUNS, help="measure these, anew if need be")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of distillation")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    there = {record["name"] for record in report.records_of(NAME)}
    for name in arguments.only or [name for name in RUNS if name not in there]:
        record = {"name": name, **measured(arguments, *RUNS[name])}
        report.keep_record(NAME, record, RUNS)
        print(f"{name}: {json.dumps(record)}", flush=True)
    print(table(report.records_of(NAME)))


if __name__ == "__main__":
    main()
