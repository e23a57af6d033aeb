"""BERTopic finds topics with a variant, and a topic model with a pointer to its folder finds them again where hf_posenc is imported.

Without the import BERTopic swallows that the folder is refused; docs/faq.md says what its user sees then, and what helps.
"""

import subprocess
import sys
import tempfile

import torch
from bertopic import BERTopic
from observing import MINILM, difference
from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

import hf_posenc


WORDS = "ship sea war king river tune band song goal team match game".split()
DOCUMENTS = [f"the {a} and the {b} of the {c}" for a in WORDS for b in WORDS[:4] for c in WORDS[6:9]]
ASKED = "a naval battle"
ELSEWHERE = """
from bertopic import BERTopic
from sentence_transformers import SentenceTransformer
print(*BERTopic.load({topics!r}{given}).find_topics({asked!r}, top_n=4)[1])
"""


def similarities(topics: BERTopic) -> list[float]:
    return topics.find_topics(ASKED, top_n=4)[1]


def elsewhere(topics: str, given: str = "") -> subprocess.CompletedProcess:
    """What a script says that does not import hf_posenc."""
    code = ELSEWHERE.format(topics=topics, given=given, asked=ASKED)
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def pointer() -> float:
    model = SentenceTransformer(MINILM, device="cpu", model_kwargs={"position_scheme": "absolute+t5"})
    with torch.no_grad():
        for parameter in hf_posenc.position_parameters(model).values():
            parameter.normal_(std=0.5)
    # Small parts of scikit-learn, since UMAP compiles for a minute.
    topics = BERTopic(embedding_model=model, umap_model=PCA(5), hdbscan_model=KMeans(4, n_init=1, random_state=0))
    topics.fit(DOCUMENTS)
    expected = similarities(topics)
    with tempfile.TemporaryDirectory() as folder:
        encoder, saved = f"{folder}/encoder", f"{folder}/topics"
        model.save(encoder)
        topics.save(saved, serialization="safetensors", save_ctfidf=True, save_embedding_model=encoder)
        found = difference(similarities(BERTopic.load(saved)), expected)
        refused = elsewhere(saved)
        assert "'NoneType' object has no attribute 'flatten'" in refused.stderr, refused
        trusted = elsewhere(
            saved, f", embedding_model=SentenceTransformer({encoder!r}, device='cpu', trust_remote_code=True)"
        )
    assert trusted.returncode == 0, trusted.stderr
    return max(found, difference([*map(float, trusted.stdout.split())], expected))


if __name__ == "__main__":
    found = pointer()
    assert found < 1e-4, found
    print(f"pointer: similarities of topics differ by {found:.0e}")
