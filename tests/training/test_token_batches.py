"""Batches by a limit of tokens: alone, in two processes of accelerate, and in `PositionTrainer`."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import distributed_worker as worker
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from tiny import Sentences, build
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hf_posenc.training import PositionTrainer, TokenBatchSampler


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def lengths(number: int, seed: int = 0) -> list[int]:
    """Many short texts, and some long ones."""
    draw = random.Random(seed)
    return [min(4 + int(draw.expovariate(1 / 40)), 512) for _ in range(number)]


def padding(batches: list[list[int]], of: list[int]) -> float:
    """The share of padding in batches."""
    places = sum(len(batch) * max(of[text] for text in batch) for batch in batches)
    return 1 - sum(of[text] for batch in batches for text in batch) / places


class TestBatches:
    @pytest.mark.parametrize("number, multiple", [(1, 1), (7, 2), (300, 1), (300, 4), (3000, 2)])
    @pytest.mark.parametrize("counts_padding", [True, False])
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_each_text_once_below_the_limit_and_as_many_batches_in_each_epoch(
        self, number, multiple, counts_padding, shuffle
    ):
        of = lengths(number)
        sampler = TokenBatchSampler(of, 600, counts_padding, multiple, shuffle)
        seen = []
        for epoch in range(4):
            sampler.set_epoch(epoch)
            batches = list(sampler)
            of_batches = sorted(text for batch in batches for text in batch)
            assert of_batches == list(range(number)) or (number == 7 and {*of_batches} == {*range(7)})
            assert len(batches) == len(sampler)
            assert len(batches) % multiple == 0
            for batch in batches:
                own = [of[text] for text in batch]
                assert (len(own) * max(own) if counts_padding else sum(own)) <= 600
            assert max(of[text] for text in batches[0]) == max(of) or multiple > 1
            seen.append(batches)
        assert (seen[0] != seen[1]) == (shuffle and number > 7)
        sampler.set_epoch(1)
        assert list(sampler) == seen[1]

    def test_batches_are_about_as_few_as_they_can_be(self):
        of = lengths(4000)
        assert len(TokenBatchSampler(of, 4096)) * 4096 < 1.15 * sum(of)

    def test_processes_have_the_same_amount_of_work(self):
        of = lengths(4000)
        batches = list(TokenBatchSampler(of, 4096, multiple_of=2))
        costs = [len(batch) * max(of[text] for text in batch) for batch in batches]
        assert max(abs(first - second) for first, second in zip(costs[::2], costs[1::2])) < 0.1 * 4096

    def test_a_text_longer_than_the_limit_is_alone(self):
        batches = list(TokenBatchSampler([3, 50, 4, 60, 5], 20))
        assert [1] in batches and [3] in batches and len(batches) <= 5

    @pytest.mark.parametrize("number, multiple", [(5, 2), (7, 4), (1001, 2)])
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_processes_have_as_many_batches_where_each_text_is_alone(self, number, multiple, shuffle):
        of = [3000 + text for text in range(number)]
        sampler = TokenBatchSampler(of, 4096, True, multiple, shuffle)
        batches = list(sampler)
        assert len(batches) == len(sampler) == multiple * math.ceil(number / multiple)
        assert {text for batch in batches for text in batch} == {*range(number)}
        seen = sorted(text for batch in batches for text in batch)
        assert [text for text in {*seen} if seen.count(text) > 1] == [*range(len(batches) - number)]
        loaders = [
            prepare_data_loader(
                DataLoader(range(number), batch_sampler=sampler, collate_fn=list),
                num_processes=multiple, process_index=process, put_on_device=False, even_batches=False,
            )
            for process in range(multiple)
        ]  # fmt: skip
        assert {len(list(loader)) for loader in loaders} == {len(batches) // multiple}

    def test_there_is_less_padding_than_in_batches_of_a_size_and_in_those_of_mini_batch_num_tokens(self):
        """sentence-transformers cuts a batch, in its order, where the tokens without padding would exceed its limit."""
        from sentence_transformers.base.losses.gradcache import _minibatch_ranges

        of = lengths(4000)
        order = torch.randperm(4000, generator=torch.Generator().manual_seed(0)).tolist()
        mask = torch.arange(512) < torch.tensor([of[text] for text in order])[:, None]
        ranges = _minibatch_ranges({"input_ids": mask.long(), "attention_mask": mask.long()}, 32, 4096)
        cut = padding([order[start:stop] for start, stop in ranges], of)
        sizes = padding([order[start : start + 32] for start in range(0, 4000, 32)], of)
        by_length = sorted(order, key=of.__getitem__)
        ordered = padding([by_length[start : start + 32] for start in range(0, 4000, 32)], of)
        own = padding(list(TokenBatchSampler(of, 4096)), of)
        assert ordered < 0.1 and own < 0.1 < 0.5 < sizes and cut > 0.5

    @pytest.mark.parametrize(
        "given, message", [(([], 4), "fewer"), (([3], 0), "positive"), (([3], 4, True, 2), "1 texts are fewer")]
    )
    def test_what_is_refused(self, given, message):
        with pytest.raises(ValueError, match=message):
            TokenBatchSampler(*given)


class Ragged(Sentences):
    """Sentences of different lengths."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        item = super().__getitem__(index)
        length = 3 + index % 9
        return {name: value[:length] if isinstance(value, torch.Tensor) else value for name, value in item.items()}


def collate(features: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(feature["input_ids"]) for feature in features)
    pad = torch.nn.functional.pad
    batch = {
        name: torch.stack([pad(feature[name], (0, longest - len(feature["input_ids"]))) for feature in features])
        for name in ("input_ids", "attention_mask")
    }
    return batch | {"labels": torch.stack([torch.as_tensor(feature["labels"]) for feature in features])}


def stepped(folder: str, accumulated: int) -> tuple[torch.Tensor, PositionTrainer]:
    """All weights after one step of `PositionTrainer` on all texts in batches by tokens, in as many processes as there are."""
    model = build("absolute+t5", head="ForSequenceClassification")
    settings = {"max_steps": 1, "gradient_accumulation_steps": accumulated, "learning_rate": 0.5, "seed": 1}
    settings |= {"max_grad_norm": 0.0, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(folder, disable_tqdm=True, lr_scheduler_type="constant", **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = PositionTrainer(
        model,
        arguments,
        train_dataset=Ragged(),
        data_collator=collate,
        optimizers=(optimizer, None),
        max_tokens_per_batch=24,
    )
    trainer.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), trainer


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    """All weights before and after one step on all texts at once."""
    model, data = build("absolute+t5", head="ForSequenceClassification"), Ragged()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()(**collate([data[index] for index in range(len(data))])).loss.backward()
    optimizer.step()
    return before, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_position_trainer_weights_all_texts_alike(tmp_path):
    before, expected = whole()
    found, trainer = stepped(str(tmp_path), accumulated=100)
    sizes = {len(batch["labels"]) for batch in trainer.get_train_dataloader()}
    assert len(sizes) > 1 and (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class OneOfTwo(PositionTrainer):
    """Gets the batches of the first of two processes, and remembers them."""

    def get_train_dataloader(self):
        return prepare_data_loader(
            super().get_train_dataloader(), num_processes=2, process_index=0, even_batches=False
        )

    def training_step(self, model, inputs, *args, **kwargs):
        self.read = [*getattr(self, "read", ()), inputs["input_ids"].tolist()]
        return super().training_step(model, inputs, *args, **kwargs)


def test_a_resumed_epoch_goes_on_with_its_own_batches(tmp_path):
    def trained(resume: str | None = None) -> list[list]:
        settings = {"num_train_epochs": 2, "save_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        trainer = OneOfTwo(
            build("t5", head="ForSequenceClassification"),
            TrainingArguments(str(tmp_path), **settings),
            train_dataset=Ragged(),
            data_collator=collate,
            max_tokens_per_batch=24,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.read

    whole = trained()
    done = len(whole) // 2 + 1
    assert done > 2 and whole[: done - 1] != whole[done - 1 :]
    assert trained(str(tmp_path / f"checkpoint-{done}")) == whole[done:]


def test_position_trainer_needs_data_with_a_length(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="train_dataset with a length"):
        PositionTrainer(build("t5"), arguments, train_dataset=Stream(), max_tokens_per_batch=9)


def test_all_choices_of_a_question_are_counted(tmp_path):
    data = [{"input_ids": [[5] * (40 + 10 * choice) for choice in range(4)], "labels": 0} for _ in range(12)]

    def collate_choices(rows):
        return {"input_ids": torch.tensor([[one + [0] * (70 - len(one)) for one in row["input_ids"]] for row in rows])}

    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    settings = {"train_dataset": data, "data_collator": collate_choices, "max_tokens_per_batch": 600}
    trainer = PositionTrainer(build("t5", head="ForMultipleChoice"), arguments, **settings)
    sizes = [batch["input_ids"].numel() for batch in trainer.get_train_dataloader()]
    assert max(sizes) == 2 * 4 * 70 and sum(sizes) == 12 * 4 * 70


def test_another_order_of_texts_is_refused(tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, train_sampling_strategy="sequential")
    PositionTrainer(build("t5"), arguments, train_dataset=Ragged())
    with pytest.raises(ValueError, match="train_sampling_strategy='sequential' does not fit"):
        PositionTrainer(build("t5"), arguments, train_dataset=Ragged(), max_tokens_per_batch=40)


def in_two_processes() -> None:
    """What each process does: batches of two epochs, a step of a loop of one's own with packed states by varlen, a step of `PositionTrainer`."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from hf_posenc.modeling.kernels import packed_attention, packing

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    data = Ragged()
    of = [len(data[index]["input_ids"]) for index in range(len(data))]
    sampler = TokenBatchSampler(of, 40, multiple_of=accelerator.num_processes)
    loader = accelerator.prepare(DataLoader(range(len(data)), batch_sampler=sampler, collate_fn=list))
    measured = {"epochs": [list(loader) for _ in range(2)]}

    packing.FEWEST_PLACES, packing.SMALLEST_SHARE = 1, 0.0
    packed_attention.has_kernel, packed_attention.DTYPES = lambda device: True, (torch.float32,)
    calls, kernel = [], packed_attention.KERNELS["cpu"]
    packed_attention.KERNELS["cpu"] = lambda *given: calls.append(1) or kernel(*given)
    model = build("absolute+rope", head="ForSequenceClassification")
    reference = build("absolute+rope", head="ForSequenceClassification", unpad=False)
    wrapped, batches = accelerator.prepare(model), measured["epochs"][0]
    for number, batch in enumerate(batches):
        with accelerator.no_sync(wrapped) if number + 1 < len(batches) else torch.enable_grad():
            output = wrapped(**collate([data[index] for index in batch]))
            # The mean over all texts: of sums, divided by their number; DDP divides by the number of processes.
            (output.loss * len(batch) / len(data) * accelerator.num_processes).backward()
    reference(**collate([data[index] for index in range(len(data))])).loss.backward()
    gradients = [torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (model, reference)]
    measured |= {"varlen": len(calls), "difference": float((gradients[0] - gradients[1]).abs().max())}
    measured["largest"] = float(gradients[1].abs().max())

    before, expected = whole()
    found, trainer = stepped(sys.argv[1], accumulated=100)
    measured |= {"step": float((found - expected).abs().max()), "moved": float((expected - before).abs().max())}
    Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(measured))
    # The group of processes ends last: a wrapped model that outlives it would wait, with Python's lock, for a thread that needs the lock.
    del wrapped, output, trainer
    accelerator.free_memory()
    accelerator.end_training()


@pytest.mark.slow
def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(EXAMPLES / "accelerate_ddp_cpu.yaml"), __file__, str(tmp_path)]
    paths = [str(EXAMPLES.parent), str(Path(worker.__file__).parent), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": worker.loopback(), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for one, other in zip(first["epochs"], second["epochs"]):
        assert len(one) == len(other) and sorted(sum(one + other, [])) == list(range(len(Ragged())))
    assert first["epochs"][0] != first["epochs"][1]
    for measured in (first, second):
        assert measured["varlen"] and measured["largest"] > 1e-2 and measured["difference"] < 1e-5
        assert measured["moved"] > 1e-2 and measured["step"] < 1e-5


if __name__ == "__main__":
    in_two_processes()
