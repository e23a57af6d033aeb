"""text_targets.py: targets and errors against loops, what training may change, and the search from the command line."""

import json
import sys
from functools import partial

import pytest
import text_targets
import torch
from long_prose import write_articles
from minilm import packaged_minilm
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer

from hf_posenc.conversion.distillation import has_bfloat16
from hf_posenc.conversion.targets import original_states


EXACT = not has_bfloat16(torch.device("cpu"))


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "wikitext2").mkdir()
    write_articles(folder / "wikitext2", "valid.txt", number=40)
    return text_targets.Trials(packaged_minilm(), folder, folder / "work"), folder


@torch.no_grad()
def vector(model, ids):
    return model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0)


def test_the_vector_of_a_text_is_the_mean_of_its_chunks(trials):
    trials, _ = trials
    batch = trials.windows.draw(500, 2, torch.Generator().manual_seed(0))
    found = text_targets.target(trials.original, batch, 256)
    for row, own in zip(batch["input_ids"].tolist(), found[0]):
        halves = [[row[0], *row[1:250], row[-1]], [row[0], *row[250:499], row[-1]]]
        expected = torch.stack([vector(trials.original, half) for half in halves]).mean(dim=0)
        torch.testing.assert_close(own, expected, atol=1e-5 if EXACT else 2e-2, rtol=0)
    states = original_states(trials.original, batch, 256)
    assert all(torch.equal(one, other) for one, other in zip(found[1:], states[1:]))
    # A text that one chunk holds has its own vector.
    batch = trials.windows.draw(100, 1, torch.Generator().manual_seed(0))
    [own] = text_targets.target(trials.original, batch, 256)[0]
    expected = vector(trials.original, batch["input_ids"][0].tolist())
    torch.testing.assert_close(own, expected, atol=1e-5 if EXACT else 2e-2, rtol=0)


def test_errors_are_those_of_loops():
    generator = torch.Generator().manual_seed(0)
    states, aim = ([torch.randn(2, 7, 5, generator=generator) for _ in range(3)] for _ in range(2))
    aim[0] = torch.randn(2, 5, generator=generator)
    cosines = [torch.dot(s.mean(0), a) / s.mean(0).norm() / a.norm() for s, a in zip(states[-1], aim[0])]
    of_texts = 1 - sum(cosines) / 2
    of_tokens = sum(((s - a) ** 2).mean() / a.var() for s, a in zip(states[1:], aim[1:])) / 2
    torch.testing.assert_close(text_targets.of_texts(states, aim), of_texts)
    torch.testing.assert_close(text_targets.of_both(states, aim), of_texts + of_tokens)


def test_a_longer_table_learns_in_its_new_rows_alone(trials, tmp_path):
    trials, data = trials
    name = "longer table, trained on texts"
    before = trials.agreement(trials.start())
    student = trials.trained(name, rate=2.4e-3, steps=4)
    assert trials.agreement(student) > before
    table = student.embeddings.position_embeddings.weight
    start = trials.start().embeddings.position_embeddings.weight
    assert torch.equal(table[:256], start[:256]) and (table[256:] != start[256:]).any(dim=1).sum() > 500
    ids = trials.windows.draw(256, 1, torch.Generator().manual_seed(1))["input_ids"][0].tolist()
    assert torch.equal(vector(student, ids), vector(trials.original, ids))


def test_agreement_is_the_mean_cosine_of_held_out_texts(trials):
    trials, _ = trials
    student, ids = trials.start(), trials.held_out.evenly_spaced(1024, 24)["input_ids"]
    cosines = [
        cosine_similarity(
            vector(student, row.tolist()), text_targets.text_vectors(trials.original, row[None], 256)[0], 0
        )
        for row in ids
    ]
    assert trials.agreement(student) == pytest.approx(float(sum(cosines) / len(ids)), abs=1e-5 if EXACT else 5e-3)


def test_a_model_is_written_with_its_length(trials, tmp_path, monkeypatch):
    trials, _ = trials
    monkeypatch.setitem(text_targets.TRAINED, "new", text_targets.of_both)
    monkeypatch.setattr(text_targets, "Distillation", partial(text_targets.Distillation, max_tokens=512))
    trials.write("new", tmp_path / "new" / "table")
    model = AutoModel.from_pretrained(tmp_path / "new" / "table")
    assert model.config.max_position_embeddings == 1024
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "table").model_max_length == 1024
    assert torch.equal(
        model.embeddings.position_embeddings.weight, trials.trained("new").embeddings.position_embeddings.weight
    )


def test_rates_are_tried_from_the_command_line(trials, tmp_path, monkeypatch, capsys):
    _, data = trials
    arguments = ["--data", data, "--names", "longer table, trained on both", "--rates", 1.5e-4, 6e-4, "--steps", 2]
    output = tmp_path / "found.json"
    output.write_text(json.dumps({"another": {}}))
    monkeypatch.setattr(sys, "argv", ["text_targets.py", *map(str, [*arguments, "--output", output])])
    text_targets.main()
    found = json.loads(output.read_text())
    assert [*found] == ["another", "longer table, trained on both"]
    own = found["longer table, trained on both"]
    assert [*own["cosine"]] == ["0", "0.00015", "0.0006"] and own["steps"] == 2
    assert all(0 < one < 1 for one in own["cosine"].values()) and str(tmp_path) not in json.dumps(own)
    assert "longer table, trained on both {'0'" in capsys.readouterr().out
    # Further rates join those of as many steps.
    for rate, steps in ((2.4e-3, 2), (1.5e-4, 1)):
        more = [*arguments[:4], "--rates", rate, "--steps", steps, "--output", output]
        monkeypatch.setattr(sys, "argv", ["text_targets.py", *map(str, more)])
        text_targets.main()
        again = json.loads(output.read_text())["longer table, trained on both"]
        assert again["steps"] == steps
        assert [*again["cosine"]] == (["0", "0.00015", "0.0006", "0.0024"] if steps == 2 else ["0", "0.00015"])


def test_the_table_has_a_column_for_each_rate():
    found = {
        "a": {"cosine": {"0": 0.5, "0.0006": 0.75, "0.00015": 0.625}},
        "b": {"cosine": {"0": 0.5, "0.0006": 0.25}},
    }
    header, _, *rows = text_targets.table(found).splitlines()
    assert header == "| trained | not trained | rate 0.00015 | rate 0.0006 |"
    assert rows == ["| a | 0.500 | 0.625 | **0.750** |", "| b | **0.500** |  | 0.250 |"]
