import torch
from torch import nn

from aphq.quant.layers import QuantizedLayer, quantized_sites
from aphq.stages.samples import LARGEST_MATRIX, Sample, Samples, sample_inputs

from ..runs import pixels, short, workspace


def sampled(model: nn.Module, unit_name: str, tokens: int, seed: int = 0) -> Samples:
    work = workspace(model, short(seed=seed, calibration__batch=5), pixels(16))
    unit, rows = next((u, r) for u, r in work.walk_one(work.student) if u.name == unit_name)
    sites = dict(quantized_sites(work.student, unit_name))
    groups = {n: (1,) if isinstance(s, QuantizedLayer) else (s.heads, 1, 1) for n, s in sites.items()}
    return sample_inputs(work, unit, rows, sites, groups, tokens)


def test_as_many_rows_as_asked_and_the_range_of_all(tiny_vit: nn.Module) -> None:
    some, everything = sampled(tiny_vit, "blocks.0", 64), sampled(tiny_vit, "blocks.0", 10**6)
    assert everything["blocks.0.mlp.fc1"][0].values.shape == (16 * 17, 32)
    assert everything["blocks.0.attn.pv"][0].values.shape == (16, 2, 17, 17)
    for name, samples in some.items():
        for sample, whole in zip(samples, everything[name], strict=True):
            assert torch.equal(sample.range.lower, whole.range.lower), "extremes are of everything seen"
            assert torch.equal(sample.range.upper, whole.range.upper)
            assert sample.range.upper.shape == sample.groups
    assert 60 <= len(some["blocks.0.mlp.fc1"][0].values) <= 68
    assert 4 <= len(some["blocks.0.attn.qk"][0].values) <= 8, "whole matrices, about 64 rows in all"


def test_both_operands_of_a_product_come_from_the_same_images(tiny_vit: nn.Module) -> None:
    scores, values = sampled(tiny_vit, "blocks.0", 64)["blocks.0.attn.pv"]
    assert len(scores.values) == len(values.values)
    assert torch.allclose(scores.values.sum(-1), torch.ones(()), atol=1e-5), "the left one is a softmax"
    assert values.values.shape[1:] == (2, 17, 16)


def test_a_convolution_is_sampled_as_a_matrix(tiny_vit: nn.Module) -> None:
    (patches,) = sampled(tiny_vit, "patch_embed", 64)["patch_embed.proj"]
    assert patches.values.shape[1] == 3 * 8 * 8


def test_the_seed_decides_the_rows(tiny_vit: nn.Module) -> None:
    found = [sampled(tiny_vit, "blocks.1", 32, seed)["blocks.1.mlp.fc2"][0].values for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_swin_gives_windows_as_samples(tiny_swin: nn.Module) -> None:
    found = sampled(tiny_swin, "layers.0.blocks.0", 64)
    assert found["layers.0.blocks.0.attn.qk"][0].values.shape[1:] == (2, 16, 8)


def test_matrices_of_different_sizes_are_thinned_alike() -> None:
    """What is left of a product of two operands is the product of what is left of them, on some tokens."""
    left, right = Sample((1,)), Sample((1,))
    for tokens in (30, 12, LARGEST_MATRIX + 50):
        number = torch.arange(float(tokens))
        p, v = number.expand(1, 2, tokens, -1), number.view(-1, 1).expand(1, 2, -1, 3)
        left.add(p, p)
        right.add(v, v)
    assert left.values.shape == (3, 2, 12, 12)
    assert right.values.shape == (3, 2, 12, 3)
    assert torch.equal(left.values[:, 0, 0], right.values[:, 0, :, 0]), "the same tokens of both"
    assert left.values[0, 0, 0].tolist()[::11] == [0, 29], "from the first to the last"
    assert float(left.range.upper) == LARGEST_MATRIX + 49, "the range is that of everything"
