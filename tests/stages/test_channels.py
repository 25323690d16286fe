import pytest
import torch

from aphq.quant.affine import fake_quantize
from aphq.quant.quantizer import Quantizer
from aphq.stages.channels import channel_scales


@pytest.mark.parametrize("symmetric", [False, True])
def test_each_channel_gets_a_scale_of_its_own_that_beats_its_full_range(symmetric: bool) -> None:
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 100.0])
    quantizer = Quantizer(4, symmetric, (1,))
    scale, zero_point = channel_scales(x, quantizer, 32)
    assert scale.shape == zero_point.shape == (3,)
    assert torch.allclose(scale / scale[0], torch.tensor([1.0, 10.0, 100.0]), rtol=0.5)
    widest = Quantizer(4, symmetric, (3,))
    widest.set_range(x.amin(0), x.amax(0))
    found = (fake_quantize(x, scale, zero_point, 4) - x).square().sum(0)
    assert (found <= (fake_quantize(x, widest.scale.data, widest.zero_point, 4) - x).square().sum(0)).all()
