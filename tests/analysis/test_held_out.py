import torch

from aphq.analysis.held_out import sides, switched
from aphq.quant.layers import QuantizedLinear, QuantizedProduct
from aphq.quant.quantizer import Quantizer


def quantizer() -> Quantizer:
    return Quantizer(4, False, (1,))


def test_sides_name_the_quantizers_that_are_there() -> None:
    layer = QuantizedLinear(torch.nn.Linear(2, 2), quantizer(), None)
    assert sides(layer) == {"weights": [layer.weight_quantizer]}
    product = QuantizedProduct(1)
    assert sides(product) == {}
    product.left, product.right = quantizer(), quantizer()
    assert sides(product) == {"activations": [product.left, product.right]}


def test_switched_quantizers_are_put_back_even_after_an_error() -> None:
    on, off = quantizer(), quantizer()
    on.enabled = True
    try:
        with switched([on, off], True):
            assert on.enabled
            assert off.enabled
            raise KeyError
    except KeyError:
        pass
    assert on.enabled
    assert not off.enabled
