"""What attention with position terms keeps in memory."""

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_posenc.modeling.kernels import strategies


pytestmark = [pytest.mark.usefixtures("blocks_for_all_lengths"), pytest.mark.slow]


class Largest(TorchDispatchMode):
    """The number of entries of the largest floating-point tensor (stock's own mask is boolean)."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


SCHEMES = tiny.schemes_with_terms()


@tiny.cross(scheme=SCHEMES, dropout=[0.0, 0.1], rest=pytest.mark.slow)
def test_memory_grows_with_the_length_and_not_with_its_square(scheme, dropout, monkeypatch):
    monkeypatch.setattr(strategies, "BLOCK_SIZE", 1 << 15)
    monkeypatch.setattr(strategies, "ROWS", 32)
    monkeypatch.setattr(strategies, "KEYS", 16)
    monkeypatch.setattr(strategies, "KERNEL_BLOCK_SIZE", 1 << 15)
    monkeypatch.setattr(strategies, "KERNEL_ROWS", 64)
    monkeypatch.setattr(strategies, "KEPT_PAIRS", 128 * 128)
    entries, saved = [], []
    for length in (256, 512):
        sizes = {"max_position_embeddings": length, "attention_probs_dropout_prob": dropout, "num_hidden_layers": 1}
        model = tiny.build(position_scheme=scheme, **sizes).train()
        ids = torch.randint(1, 99, (2, length))
        mask = (torch.arange(length) < torch.tensor([[length], [length // 2]])).long()
        kept: dict[int, int] = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=ids, attention_mask=mask).last_hidden_state.square().sum().backward()
        entries.append(largest.entries)
        saved.append(sum(kept.values()))
    # What depends on the model alone is less than half of it.
    assert saved[1] < 2.1 * saved[0]
    assert entries[1] < 2.1 * entries[0] and entries[1] < 512 * 512
