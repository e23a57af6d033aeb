"""The page questions.md, of what was measured: docs/what-positions-do.json and benchmarks/results/comparison.

Written by `python docs/what_positions_do.py`, and again by `python docs/generate.py` where a number or a sentence here has changed.
"""

import json
import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
RUNS = ROOT / "benchmarks" / "results" / "comparison"
LEARNED = "sinusoidal:position_learn_amplitude=true"
STUDENT_2 = 4.303  # of Student's t with two degrees of freedom, 97.5 %: three seeds
SHARES, LAYERS = (0.5, 0.8, 0.9, 0.95), range(1, 7)
Numbers = dict[str, Any]

INTRODUCTION = """\
# Questions about positions, and short answers

<!-- written by docs/generate.py from what was measured -->

Each answer has two sentences, the figure that it rests on, how many texts, sentences or seeds that is of, and where it would not hold. Intervals
are of 95 %: over texts and sentences by bootstrap (documents are drawn as a whole), over three seeds by Student's t, over random rotations from
the 2.5th to the 97.5th percentile. Unless something else is said, the model is all-MiniLM-L6-v2, a BERT of 6 layers, 12 heads and 384 features
with a learned table of 512 positions, trained to give sentence vectors, and the text is Python's language reference. [What positions do in
MiniLM](what-positions-do.md) has the pictures and the definitions.

`python docs/what_positions_do.py` measures everything but the training, which `python benchmarks/comparison.py` does, and writes this page (with
`--data FOLDER`, on WikiText-2 too). To measure it again with code of your own: [numbers](what-positions-do.json) and [arrays](what-positions-do.npz) (read with `numpy.load`)."""


@dataclass(frozen=True)
class Question:
    """A question, an answer in two sentences, the figure behind it, its sample and interval, and where it would not hold."""

    question: str
    answer: str
    figure: str
    sample: str
    limits: str

    def markdown(self) -> str:
        parts = {"Figure": self.figure, "Sample and interval": self.sample, "Where it would not hold": self.limits}
        points = "\n".join(_wrapped(f"- **{name}.** {text}", "  ") for name, text in parts.items())
        return f"## {self.question}\n\n{_wrapped(self.answer)}\n\n{points}"


def _wrapped(text: str, indent: str = "") -> str:
    """In lines of 140, none of which begins with a sign that belongs to the number before it."""
    kept = " ".join(text.split()).replace(" %", "\0%").replace(" ± ", "\0±\0")
    filled = textwrap.fill(kept, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\0", " ")


def seeds(part: str, scheme: str, length: int, metric: str) -> list[float]:
    """What the runs of a part of the comparison reached, by seed: the first three, which every scheme has."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in (RUNS / part / "runs").glob("*.json")]
    own = sorted((run for run in runs if run["scheme"] == scheme), key=lambda run: run["seed"])
    return [run["metrics"][str(length)][metric] for run in own[:3]]


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation."""
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def apart(own: list[float], other: list[float]) -> tuple[float, float, float]:
    """Mean difference seed by seed, and its interval by Student's t."""
    differences = [a - b for a, b in zip(own, other, strict=True)]
    mean, error = statistics.fmean(differences), STUDENT_2 * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - error, mean + error


def difference(own: list[float], other: list[float]) -> str:
    """It in words, such as 0.004 (−0.010 to 0.018)."""
    mean, low, high = apart(own, other)
    return f"{signed(mean)} ({signed(low)} to {signed(high)})"


def signed(value: float, digits: int = 3) -> str:
    """With a minus that is one, and none before nothing."""
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"


def percent(share: float, digits: int = 0) -> str:
    return f"{signed(100 * share, digits)} %"


def between(interval: list[float], digits: int = 0) -> str:
    low, high = interval
    return f"{signed(100 * low, digits)} to {percent(high, digits)}"


def plain(interval: list[float], digits: int = 2) -> str:
    return f"{signed(interval[0], digits)} to {signed(interval[1], digits)}"


def listed(numbers: list) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def spaces(found: Numbers, part: str, space: str, layer: int = 1) -> list[Numbers]:
    """The overlaps of a space by share."""
    rows = found["answers"]["subspaces"][part]
    return [row for row in rows if row["space"] == space and row["layer"] == layer]


def add_or_concatenate(found: Numbers) -> Question:
    scratch, tuned = (
        [seeds(part, f"absolute{how}", length, metric) for how in ("", ":position_combine=concat")]
        for part, length, metric in (("scratch", 32, "masked_loss"), ("punctuation", 64, "f1"))
    )
    return Question(
        "Why add positions to the words, and not concatenate them?",
        """With learned tables as wide as the model, concatenating and projecting computes nothing that adding could not: W[w; p] + b = W₁w + W₂p + b,
        where W₁ and W₂p + b can be taken into the two tables, if the output head does not share the word embeddings, so that only optimisation
        differs. With BERT's output head, which shares them, or with fixed sinusoids it can express strictly more; with learned tables
        three seeds do not tell the two apart.""",
        f"""Masked-LM loss from scratch {spread(scratch[0])} added and {spread(scratch[1])} concatenated; F1 on punctuation, fine-tuned, {spread(tuned[0])}
        and {spread(tuned[1])} ([all ways](comparison.md#add-positions-to-the-words-or-concatenate-them)).""",
        f"""Three seeds each, mean ± standard deviation. Concatenated less added, seed by seed: loss {difference(scratch[1], scratch[0])}, F1
        {difference(tuned[1], tuned[0])}.""",
        """Intervals of three seeds are wide: differences within them are not ruled out. A BERT of 2 layers and width 128 for 800 steps, with the
        shared head, and MiniLM for 240; longer training, and ten seeds, wait for a
        measurement. Side by side, with features of their own and no projection, is another thing ([figures](comparison.md#words-and-positions-side-by-side)).""",
    )


def told_apart(found: Numbers) -> Question:
    left, probes = found["answers"]["survival"], found["models"]["MiniLM"]["probes"]
    near, ends, other = left["nearest"], left["interval"], found["other_text"]["survival"]
    return Question(
        "Can the model keep words and positions apart after they were added?",
        f"""Yes: at its input the nearest word embedding names the word of {percent(near[0], 1)} of the tokens, with their positions still added, and
        a linear probe reads the position from the same vectors. Both hold through layer 3, and fade in the last layers, words no less
        than positions.""",
        f"""Nearest of {left["vocabulary"]:,} word embeddings by cosine: {percent(near[0], 1)} right at the input, {percent(near[3], 1)} after layer 3,
        {percent(near[-1])} after the last; R² of the position {probes["position"][0]:.3f}, {probes["position"][3]:.3f} and
        {probes["position"][-1]:.3f}.""",
        f"""{left["tokens"]:,} tokens of {left["documents"]} documents: {between(ends[0], 1)} at the input, {between(ends[3], 1)} after layer 3,
        {between(ends[-1])} after the last. Probes: {probes["examples"]:,} tokens of {probes["documents"]} held-out documents, R²
        {plain(probes["intervals"]["position"][0], 3)}, {plain(probes["intervals"]["position"][3], 3)} and
        {plain(probes["intervals"]["position"][-1])}; without positions, the same probes reach {probes["position_without"]:.2f}.""",
        f"""On WikiText-2 words are told no less well: {percent(other["nearest"][3], 1)} ({between(other["interval"][3], 1)}) after layer 3 and
        {percent(other["nearest"][-1])} ({between(other["interval"][-1])}) after the last. That both can be told does not say that heads read them without mixing. The model was trained last to give one vector for a
        sentence, where neither is asked for; a masked-LM model has to name words at its output. Nearest of the rows is a floor: a trained
        classifier would tell more.""",
    )


def orthogonal(found: Numbers) -> Question:
    whole = spaces(found, "tables", "embeddings")
    heads = [row for name in ("queries", "keys") for row in spaces(found, "tables", name)]
    rotations, by_share = found["answers"]["subspaces"]["rotations"], {row["share"]: row for row in whole}
    count = sum(row["positions_in_words"]["heads"] for row in heads)
    below = {name: sum(row[name]["below"] for row in heads) for name in ("positions_in_words", "words_in_positions")}
    above = {name: sum(row[name]["above"] for row in heads) for name in ("positions_in_words", "words_in_positions")}
    half, most = by_share[0.5]["positions_in_words"], by_share[0.95]["positions_in_words"]
    in_heads = {share: [row["positions_in_words"] for row in heads if row["share"] == share] for share in SHARES}
    return Question(
        "Do words and positions lie in orthogonal subspaces?",
        """Nearly, where they are added: at every share of the variance that the subspaces are to hold, far less of the positions' variance lies in
        that of the words than if they were rotated at random. It lasts in the first layer's queries and keys: head by head
        they overlap less than by chance, but for head 3, in which words hardly matter, at the largest shares.""",
        f"""Of the positions' variance, {percent(half["median"], 1)} lies where half of the words' is (rotated: {percent(half["chance"])}), and
        {percent(most["median"], 1)} where 95 % is (rotated: {percent(most["chance"])}). In queries and keys, {below["positions_in_words"]} of
        {count} comparisons (two sides, twelve heads, four shares) are below the interval of the rotations and {above["positions_in_words"]} above
        it; the other way round, words in positions, {below["words_in_positions"]} and {above["words_in_positions"]}.""",
        f"""All {found["models"]["MiniLM"]["longest"]} positions, all 30,522 words, {rotations:,} rotations of the positions before W_q and W_k: at the embeddings
        {between([half["low"], half["high"]])} and {between([most["low"], most["high"]])}. Heads are no sample of anything, so there is no interval over them:
        in queries and keys, {"; ".join(_in_heads(own, share) for share, own in in_heads.items())}.""",
        """Less than by chance is not orthogonal: in single heads more than half is shared at the largest shares. Nor does comparing need words and positions in the same
        dimensions: each asks its own kind, and a word that asks positions needs its query near the *keys* of positions, which is
        another pair of subspaces. One checkpoint, words counted once each; a share of 95 % takes most of a head's 32 dimensions, where any two
        subspaces meet.""",
    )


def _in_heads(own: list[Numbers], share: float) -> str:
    """Of queries and keys, at one share."""
    smallest, largest = min(one["smallest"] for one in own), max(one["largest"] for one in own)
    chance = [one["chance"] for one in own]
    return f"at {percent(share)} {between([smallest, largest])} (the median head rotated: {between([min(chance), max(chance)])})"


def depth(found: Numbers) -> Question:
    left, other = found["answers"]["survival"], found["other_text"]
    own, elsewhere = _by_layer(found["answers"]["subspaces"]["layers"]), _by_layer(other["subspaces"])
    states = [own[layer, "states"][0.9]["positions_in_words"] for layer in LAYERS]
    half, half_elsewhere = (rows[6, "states"][0.5]["positions_in_words"] for rows in (own, elsewhere))
    return Question(
        "Does depth mix them?",
        f"""Hardly, up to layer 5: in most heads positions lie in the words' subspace less than by chance, at every share. In layer 6, where positions are
        {percent(left["position_share"][5])} of the variance, they do so in few at half of the variance, and in some more than by chance; whether the states that go
        into it overlap as much as chance has it depends on the text.""",
        f"""Of 24 (queries and keys of twelve heads), below the interval of the rotations at 50, 80, 90 and 95 % of the variance:
        {_counted(own, "below")}. Above it: {_counted(own, "above")}. In the states that go into the layers, where 90 % of the words' variance is lies of the
        positions' {listed([percent(state["median"], 1) for state in states])} (rotated: {listed([percent(state["chance"]) for state in states])}); into layer 6,
        where 50 % is, {percent(half["median"], 1)} (rotated: {percent(half["chance"], 1)}).""",
        f"""{left["texts"]} windows of 128 tokens, {left["words"]} words that occur four times in each half of them, 126 positions,
        {found["answers"]["subspaces"]["rotations"]:,} rotations in each layer. States: intervals of the rotations
        {"; ".join(between([state["low"], state["high"]]) for state in states)}, and into layer 6 where 50 % is {between([half["low"], half["high"]], 1)}. Numbers by
        head are in the arrays (`layers_positions_in_words`).""",
        f"""On WikiText-2 ({other["survival"]["texts"]:,} windows) below: {_counted(elsewhere, "below")}; above: {_counted(elsewhere, "above")}; into layer 6, where
        50 % is, {percent(half_elsewhere["median"], 1)} (rotated: {between([half_elsewhere["low"], half_elsewhere["high"]], 1)}). Words and positions of a
        deeper layer are means over contexts, so that what is written at a place by a neighbour counts as neither, and only frequent words
        are counted. Heads of one layer are not independent.""",
    )


def _by_layer(rows: list[Numbers]) -> dict[tuple[int, str], dict[float, Numbers]]:
    found: dict[tuple[int, str], dict[float, Numbers]] = {}
    for row in rows:
        found.setdefault((row["layer"], row["space"]), {})[row["share"]] = row
    return found


def _heads(rows: dict[tuple[int, str], dict[float, Numbers]], layer: int, side: str) -> list[int]:
    """By share, how many heads of queries and of keys are on this side of the rotations' interval."""
    return [
        sum(rows[layer, name][share]["positions_in_words"][side] for name in ("queries", "keys")) for share in SHARES
    ]


def _counted(rows: dict[tuple[int, str], dict[float, Numbers]], side: str) -> str:
    """By layer, where there are any."""
    counts = {layer: _heads(rows, layer, side) for layer in LAYERS}
    return "; ".join(f"{listed(count)} in layer {layer}" for layer, count in counts.items() if any(count)) or "none"


def dimensions(found: Numbers) -> Question:
    own, sinusoids = found["answers"]["dimensions"], found["models"]["MiniLM"]["dimensions"]["sinusoids"]
    return Question(
        "How many dimensions do positions take, and do words use them?",
        f"""Positions move {own["moved"]} of {own["width"]} dimensions and words use {own["both"]} of these, so that no dimension is left to either alone;
        but positions need {own["position_directions"]} turned axes for 95 % of their variance, and words {own["word_directions"]}. That only half of a
        sinusoid's dimensions change, so that adding is nearly a concatenation, is an understatement: in a model of 512
        dimensions, {percent(own["moving_512_over_128"])} change over 128 positions.""",
        f"""Root mean square of the numbers in word vectors {own["word_rms"]:.4f} and in position vectors {own["position_rms"]:.4f}
        ({own["word_deviation"]:.4f} and {own["position_deviation"]:.4f} about their means). Sinusoids of 384 dimensions: {percent(sinusoids["moving_over_64"])} move
        over 64 positions, {percent(sinusoids["moving_over_all"])} over 512.""",
        """The checkpoint's own tables, all 30,522 words and 512 positions, and a formula: nothing is sampled, so there is no interval. A dimension
        moves if its standard deviation is at least a tenth of the typical one (the root mean square over the dimensions).""",
        """At another threshold, length or base the share of sinusoids is another. Words of a model that was trained with sinusoids may
        avoid the dimensions that move; no such checkpoint was measured.""",
    )


def terms(found: Numbers) -> Question:
    own, probes = found["answers"]["terms"], found["models"]["MiniLM"]["terms"]
    of = own["terms"]
    names = ("word-word", "position-position", "constant-word", "word-position", "position-word", "constant-position")
    leading = [1 + head for head, one in enumerate(own["position_share"]) if one["share"] > 0.5]
    unsure = [
        1 + head for head, one in enumerate(own["position_share"]) if one["interval"][0] < 0.5 < one["interval"][1]
    ]
    return Question(
        "Which of the four terms of a score matter?",
        f"""In the first layer words asking words and positions asking positions, and each in its own heads: {len(leading)} of {probes["heads"]} heads
        ({listed(leading)}) get more than half of their variance over keys from the key's position. Words that ask positions, and positions that ask
        words, matter in one head, {probes["cross_largest_head"]}, and hardly in the others ({probes["cross_next"]:.2f} and less).""",
        "Share of the variance over keys, mean of the heads: "
        + ", ".join(f"{name} {of[name]['share']:.3f}" for name in names)
        + f". Head {probes['cross_largest_head']}: {probes['cross_largest']:.2f} from one of the two cross terms.",
        f"""{own["texts"]} windows of 128 tokens in {own["groups"]} groups: """
        + ", ".join(f"{name} {plain(of[name]['interval'], 3)}" for name in names)
        + (
            f". The interval of head {listed(unsure)} has one half in it."
            if unsure
            else ". No head's interval has one half in it."
        ),
        """The split is exact in the first layer only, where words and positions come as a sum; deeper layers see states that are both. Shares
        of terms that vary together do not add up to 1. A constant part of queries (biases, means) adds `constant-word`: keys that are looked at
        whoever asks.""",
    )


def every_layer(found: Numbers) -> Question:
    scratch, tuned = (
        [seeds(part, f"absolute{how}", length, metric) for how in ("", ":position_every_layer=true")]
        for part, length, metric in (("scratch", 32, "masked_loss"), ("punctuation", 64, "f1"))
    )
    deeper = "position_every_layer=true,position_every_layer_weight="
    once, one, large, waves, waves_one = (
        seeds("every_layer", scheme, 32, "masked_loss")
        for scheme in (
            "absolute",
            f"absolute:{deeper}1",
            f"absolute:{deeper}12.5",
            "sinusoidal",
            f"sinusoidal:{deeper}1",
        )
    )
    position = found["models"]["MiniLM"]["probes"]["position"]
    return Question(
        "Would it help to add positions again before every layer?",
        f"""In the runs there are it makes no difference that three seeds could show, and a table as strong as a layer's whole input does harm: a loss
        higher by {difference(large, once)}. Nor is there much to restore: positions are read from the
        states about as well after four layers as before the first, and fade only in the last two.""",
        f"""Masked-LM loss from scratch {spread(scratch[0])} once and {spread(scratch[1])} before every layer; F1 on punctuation {spread(tuned[0])} and
        {spread(tuned[1])}. R² of a linear probe {position[0]:.3f} before the first layer, {position[4]:.3f} after the fourth, {position[-1]:.3f} after the
        last. From scratch in four layers: {spread(once)} once, {spread(one)} with the weight 1 before every layer and {spread(large)} with 12.5, at which positions have the
        RMS of its input ([figures](comparison.md#once-or-before-every-layer)).""",
        f"""Three seeds each. Every layer less once, seed by seed: loss {difference(scratch[1], scratch[0])}, F1 {difference(tuned[1], tuned[0])}, with a weight that starts at
        zero and moves little; in four layers with the weight 1, loss {difference(one, once)} with a table and {difference(waves_one, waves)} with sinusoids.""",
        """Four layers of width 128 for 1,200 steps, two for 800, and 240 steps of fine-tuning: in deeper models more may be lost. Three seeds do not show that there is no difference; ALiBi, T5 and rotary models do put positions into
        every layer's scores, and were not compared with their own kind put in once.""",
    )


def sinusoids_or_table(found: Numbers) -> Question:
    constant, table, none, learned = (
        seeds("scratch", scheme, 32, "masked_loss") for scheme in ("sinusoidal", "absolute", "none", LEARNED)
    )
    concatenated, gated = (
        seeds("scratch", f"sinusoidal:position_combine={how}", 32, "masked_loss") for how in ("concat", "gate")
    )
    own, theirs, nothing = (seeds("punctuation", scheme, 64, "f1") for scheme in ("sinusoidal", "absolute", "none"))
    return Question(
        "Do sinusoids work as well as a learned table?",
        """More than half of the way, from scratch, where their amplitude is a constant, as it is by default; where it is learned they stay, with four of
        five seeds, where no positions are, and in fine-tuning, in the place of a checkpoint's table, they do so either way. That is about learning, and
        at one amplitude, and not about what they can do: Vaswani et al. (2017, Table 3, row E) found the two nearly identical in translation after
        full training.""",
        f"""Masked-LM loss from scratch {spread(constant)} with sinusoids added, {spread(concatenated)} concatenated and {spread(gated)} added by a gate;
        {spread(table)} with a table, {spread(none)} with neither, and {spread(learned)} with sinusoids whose amplitude is learned. F1 on punctuation,
        fine-tuned: {spread(own)}, {spread(theirs)} with the checkpoint's table and {spread(nothing)} with neither.""",
        f"""Three seeds each, seed by seed. Sinusoids less table: loss {difference(constant, table)}, F1 {difference(own, theirs)}; less none: loss
        {difference(constant, none)}, F1 {difference(own, nothing)}. Concatenated less added: loss {difference(concatenated, constant)}. Learned
        amplitude less none: loss {difference(learned, none)}.""",
        """Longer training, larger models and learning rates of the amplitude; a larger amplitude is nearer to the table at this length and worse beyond it
        ([figures](comparison.md#from-scratch)). In the fine-tuning the table is pretrained
        and sinusoids are new, so that it says what a replacement costs, not which of them is better.""",
    )


def why_sinusoids(found: Numbers) -> Question:
    own = {(one["encoding"], one["back"]): one for one in found["answers"]["addressing"]}
    index, normalised, fitted, table = (
        own[name, 1] for name in ("index", "normalised index", "sinusoids", "learned table")
    )
    parabola, closed = own["index and its square, in closed form", 1], own["sinusoids, in closed form", 1]
    return Question(
        "Why sinusoids, and not the index, or the index over the length?",
        """With an index as the only feature a score is a straight line in the key's position, so a head can point at the ends of a text and nowhere
        else; over the length it is a line too, and the word before is at another distance in every length. Sinusoids are bounded and turn a
        shift into one rotation, so that one map points at "k before" at every place and length.""",
        f"""Queries whose largest score is at the position before, by the best bilinear score for 128 positions (least squares): index
        {percent(index["fitted"], 1)}, normalised index {percent(normalised["fitted"], 1)}, sinusoids of 384 dimensions {percent(fitted["fitted"])}, MiniLM's table
        {percent(table["fitted"])}. At 256 positions: {percent(index["doubled"], 1)}, {percent(normalised["doubled"], 1)}, {percent(fitted["doubled"])} and
        {percent(table["doubled"])}, and {percent(closed["doubled"])} with the rotation itself.""",
        f"""All 127 (255) queries that have a position before them: nothing is sampled. Eight before instead of one: sinusoids
        {percent(own["sinusoids", 8]["fitted"])}, and at 256 {percent(own["sinusoids", 8]["doubled"])} fitted and
        {percent(own["sinusoids, in closed form", 8]["doubled"])} rotated.""",
        f"""The rotation exists for every length, and what a fit to 128 positions finds is not it. An index with its square beside it can point
        anywhere too, −(i − k − j)² ({percent(parabola["doubled"])} at 256), with numbers as large as the length squared beside words of
        {found["answers"]["dimensions"]["word_rms"]:.3f}. And a network with hidden layers can make anything of an index; this is about what a score sees.""",
    )


def word_order(found: Numbers) -> Question:
    own, other = found["answers"]["order"], found["other_text"]["shuffled"]
    said = own["sentences"]
    roles, mutual = said["who does it"], said["met, married, resembled"]
    named, named_mutual = said["who does it, name and article"], said["met, resembled, name and article"]
    joined, adverb, beyond = said["joined by and"], said["adverb moved"], own["beyond"]
    return Question(
        "Does word order matter to BERT?",
        f"""To this one's vectors of texts, little: shuffling all words moves a text by {percent(own["shuffled"]["text"])} of what unrelated texts differ by, and who
        did what to whom by {percent(roles["text"], 1)}. A swap that changes what is said moves a sentence hardly more than the same swap where it says
        the same, so most of what moves is not the meaning.""",
        f"""“{roles["example"][0]}” to “{roles["example"][1]}”: {percent(roles["text"], 2)}, control “{mutual["example"][0]}” to
        “{mutual["example"][1]}”: {percent(mutual["text"], 2)}. “{named["example"][0]}” to “{named["example"][1]}”: {percent(named["text"], 1)}, control
        “{named_mutual["example"][0]}”: {percent(named_mutual["text"], 1)}. Two nouns around “and”: {percent(joined["text"], 2)}; “yesterday” moved to the end:
        {percent(adverb["text"], 2)}. Different sentences of a kind lie as far apart as unrelated texts ({roles["unrelated"]:.2f} and
        {named["unrelated"]:.2f} times that).""",
        f"""{roles["count"]} sentences of each kind: {between(roles["interval"], 2)}, control {between(mutual["interval"], 2)}; {between(named["interval"], 1)}, control
        {between(named_mutual["interval"], 1)}. Beyond its control, sentence by sentence: {between(beyond["roles"]["interval"], 2)} and
        {between(beyond["named"]["interval"], 1)}. Shuffled: {own["texts"]} texts of {own["tokens"]} tokens, {between(own["shuffled"]["interval"])}.""",
        f"""On WikiText-2 shuffling moves a text by {percent(other["text"])} ({between(other["interval"])}). For tasks that need order: restoring punctuation takes it, with F1 {spread(seeds("punctuation", "absolute", 64, "f1"))} with positions and
        {spread(seeds("punctuation", "none", 64, "f1"))} without. The model was trained so that sentences of one meaning lie close, and its vector is a mean
        over tokens; sentences are made from templates, and verbs differ between a kind and its control.""",
    )


def where_lost(found: Numbers) -> Question:
    left, probes = found["answers"]["survival"], found["models"]["MiniLM"]["probes"]
    position, signs, apart_only = probes["position"], probes["signed"], probes["distance"]
    ends, other = probes["intervals"]["position"], found["other_text"]["probes"]
    words, places = (
        list(zip(left[name], left[f"{name}_parts"]["error"])) for name in ("word_share", "position_share")
    )

    def shares(part: list[tuple[float, float]]) -> str:
        return ", ".join(f"{100 * share:.0f} ± {100 * error:.0f}" for share, error in part) + " %"

    return Question(
        "Where are positions lost, and are words?",
        f"""Positions are all there up to layer 4, R² {position[4]:.2f}, and fade in the last two, to {position[5]:.2f} and {position[6]:.2f}; of words
        less is left at the end, too. Lin, Tan and Frank (2019, [arXiv:1906.01698](https://arxiv.org/abs/1906.01698)) found positions in BERT's lower layers and hierarchy in the
        higher ones, and Luo, Kulmizev and Mao (2021, [arXiv:2011.04393](https://arxiv.org/abs/2011.04393)) a few neurons, tied to position embeddings,
        that stand out in every layer.""",
        f"""R² of a linear probe of the position, by layer from the input: {", ".join(f"{one:.3f}" for one in position)}; of the signed distance between two tokens
        {", ".join(f"{one:.3f}" for one in signs)}; of the distance without its sign, from products, {", ".join(signed(one, 2) for one in apart_only)}. Of the variance of
        the states, words have {shares(words)}, and positions {shares(places)} (the rest is of neither alone).""",
        f"""{probes["examples"]:,} tokens of {probes["documents"]} held-out documents; R² after layers 4, 5 and 6 {plain(ends[4])}, {plain(ends[5])}, {plain(ends[6])}; signed
        distance {plain(probes["intervals"]["signed"][0], 3)} at the input. Variance: {left["texts"]} windows, {left["words"]} words that are in
        both halves of them; ± is from five parts of the documents, measured by themselves (Student's t), in which some rarer words are not counted.""",
        f"""On WikiText-2 the last R² is {other["position"]["r2"][-1]:.2f} ({plain(other["position"]["interval"][-1])}; after layer 4 {other["position"]["r2"][4]:.2f}).
        A sentence encoder's last layers are trained to forget where a word stood. "Give it Space!" (2026,
        [arXiv:2605.30022](https://arxiv.org/abs/2605.30022)) reports that absolute positions are lost in the final layers under masked-LM training too. Linear probes only; the
        distance without its sign is a question to products of features, and the signed one to differences.""",
    )


def begins(found: Numbers) -> Question:
    shift, other = found["models"]["MiniLM"]["phase-shift"], found["other_text"]
    return Question(
        "Does it matter where a text begins?",
        f"""Yes: moved by one position, with all else the same, a text's vector changes by {percent(shift["by_1"], 1)} of what unrelated texts differ by. Nearly all
        of that is [CLS], whose row of the table is unlike all others: if it stays, the rest may move by one at {percent(shift["but_first_by_1"], 2)}.""",
        f"""By 1: {percent(shift["by_1"], 1)}, all but [CLS] {percent(shift["but_first_by_1"], 2)}; by 256: {percent(shift["by_256"])} and
        {percent(shift["but_first_by_256"])}.""",
        f"""{shift["texts"]} texts of {found["models"]["MiniLM"]["order"]["tokens"]} tokens: {between(shift["by_1_interval"], 1)}, {between(shift["but_first_by_1_interval"], 2)};
        {between(shift["by_256_interval"])} and {between(shift["but_first_by_256_interval"])}. Control: conversions to `t5` and `rope` change by nothing but
        rounding.""",
        f"""On WikiText-2: by 1 {percent(other["by_1"]["text"], 1)} ({between(other["by_1"]["interval"], 1)}), by 256 {percent(other["by_256"]["text"])}
        ({between(other["by_256"]["interval"])}). For schemes that see distances alone it does not hold, by construction. Sinha et al. (2022, [arXiv:2210.12574](https://arxiv.org/abs/2210.12574)) found that larger
        models suffer too, by other measures.""",
    )


def relative(found: Numbers) -> Question:
    t5, rope, own = (found["models"][name]["probes"] for name in ("t5", "rope", "MiniLM"))
    best, turned = (max(range(7), key=lambda layer: one["position"][layer]) for one in (t5, rope))
    return Question(
        "Does a model with relative positions know where a token is?",
        f"""It can work it out: a conversion to `t5` tells nothing of it before its first layer and R² {t5["position"][best]:.2f} after layer {best}. A text has a
        beginning, and distances to [CLS] are positions; that it is those which are used is likely and was not measured.""",
        f"""R² of a linear probe, before the first layer, at its best and after the last: `t5` {t5["position"][0]:.2f}, {t5["position"][best]:.2f},
        {t5["position"][-1]:.2f}; `rope` {rope["position"][0]:.2f}, {rope["position"][turned]:.2f}, {rope["position"][-1]:.2f}; the original
        {own["position"][0]:.2f}, {own["position"][0]:.2f}, {own["position"][-1]:.2f}.""",
        f"""{t5["examples"]:,} tokens of {t5["documents"]} held-out documents: `t5` {plain(t5["intervals"]["position"][best])} at its best, `rope`
        {plain(rope["intervals"]["position"][turned])}. Control: the same weights without any positions reach {t5["position_without"]:.2f}.""",
        """Both were taught in 300 steps to give the original's vectors, which know positions: models trained with relative positions from the
        start need not. Windows of 128 tokens, so that no token is far from [CLS].""",
    )


QUESTIONS = (
    add_or_concatenate,
    told_apart,
    orthogonal,
    depth,
    dimensions,
    terms,
    every_layer,
    sinusoids_or_table,
    why_sinusoids,
    word_order,
    where_lost,
    begins,
    relative,
)


def page(found: Numbers) -> str:
    """The whole page, of the numbers in what-positions-do.json."""
    import answers

    arrays = "\n".join(_wrapped(f"- `{name}`: {meaning}.", "  ") for name, meaning in answers.ARRAYS.items())
    sections = [question(found).markdown() for question in QUESTIONS]
    return "\n\n".join([INTRODUCTION, *sections, f"## The arrays\n\n{arrays}"]) + "\n"
