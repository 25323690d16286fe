"""What a recipe is made of: number formats, calibration, and the settings of every stage, as frozen dataclasses.

Defaults are the hyper-parameters of the published method (its code where paper and code differ).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

ImportanceKind = Literal["mse", "brecq", "ph", "aph", "fisher"]
SoftmaxKind = Literal["probabilities", "exponentials"]
SearchMethod = Literal["minmax", "percentile", "self_mse", "output_mse"]


@dataclass(frozen=True)
class Weights:
    """How weights become integers; `bits=None` leaves them in float."""

    bits: int | None = 4
    symmetric: bool = False
    granularity: Literal["channel", "tensor"] = "channel"  # one scale per output channel, or one for the layer


@dataclass(frozen=True)
class Activations:
    """How the inputs of linear layers, convolutions and attention products become integers."""

    bits: int | None = 4
    symmetric: bool = False
    attention: Literal["head", "tensor"] = "head"  # scales of q, k, softmax and v: one per head, or one for all
    image_bits: int | None = 8  # the input picture itself; it was made of 8-bit pixels
    attention_symmetric: bool = False  # q, k and v with their zero-points in the middle, as int8 kernels want them
    # The left side of softmax times v: the probabilities; or the exponentials, of which the largest in each row is 1,
    # with the product divided by their sum afterwards: rows of even attention keep as many levels as peaked ones.
    softmax: SoftmaxKind = "probabilities"


@dataclass(frozen=True)
class Override:
    """Other bits for the layers whose name matches a pattern; a field left out keeps the recipe's value."""

    weights: int | Literal["recipe"] | None = "recipe"
    activations: int | Literal["recipe"] | None = "recipe"


@dataclass(frozen=True)
class Calibration:
    """Which images the run sees and how they are cropped."""

    images: int = 1024
    augment: bool = False  # the training augmentation (random crop, flip, colour), as the published code does
    batch: int = 32  # images per pass (a GPU may take more); random draws are made per batch


@dataclass(frozen=True)
class Importance:
    """What weights the reconstruction error (paper Sec. 3.2).

    mse: nothing; brecq: squared gradient of each sample; ph: perturbation Hessian of each sample (Eq. 7);
    aph: its average over the samples (Eq. 8), faithful to the published all-ones perturbation in float32;
    fisher: the diagonal of the Fisher matrix of the distillation loss by seeded random probes at the logits.
    """

    kind: ImportanceKind = "aph"
    temperature: float = 20.0  # of the KL divergence between teacher and student logits
    epsilon: float = 1e-6  # size of the perturbation (ph, aph)
    probes: int = 4  # backward passes per batch (fisher)
    power: float = 0.5  # fisher ** power; 1/2 has the dynamic range of aph, 1 is the Fisher diagonal itself


@dataclass(frozen=True)
class Views:
    """Fresh views of the calibration images while a stage learns, against over-fitting to a thousand pictures."""

    every: int = 0  # steps from one view of each image to the next; 0 keeps the images as they are
    copies: int = 0  # or: how many views of each image are held beside it from the start
    gigabytes: float = 20.0  # fewer are, where they and what one unit makes of them would take more than this
    smallest_crop: float = 0.25  # share of the picture's area that a crop shows at least
    jitter: float = 0.4  # brightness, contrast and saturation each by a factor in 1 +- jitter
    mixup: float = 0.0  # share of the views that are blended with another image
    cutmix: float = 0.0  # share of the views with a rectangle out of another image


@dataclass(frozen=True)
class Rotation:
    """The residual stream and the attention heads in a random basis without outlying channels, folded into weights."""

    kind: Literal["rotation"] = "rotation"
    stream: bool = True
    heads: bool = True
    NAME: ClassVar[str] = "rotation"


@dataclass(frozen=True)
class MlpReconstruction:
    """GELU becomes ReLU in every MLP, retrained against the float MLP (paper Sec. 3.3, Eq. 11-14)."""

    kind: Literal["mlp_reconstruction"] = "mlp_reconstruction"
    steps: int = 20_000
    batch: int = 32
    learning_rate: float = 4e-5  # Adam, cosine to zero
    percentile: float = 0.99  # p of the clamp, over the positive post-GELU values of the teacher
    alpha: float = 2.0  # weight of the clamped loss
    loss_scale: float = 0.1
    importance: Importance = field(default_factory=Importance)
    views: Views = field(default_factory=Views)
    NAME: ClassVar[str] = "mlp_reconstruction"


@dataclass(frozen=True)
class LayerNormReparameterisation:
    """LayerNorm outputs are rescaled per channel, undone in the next weights, so that one scale fits all channels."""

    kind: Literal["layernorm_reparameterisation"] = "layernorm_reparameterisation"
    images: int = 128
    candidates: int = 128
    values: bool = False  # the same for the channels of the attention values, undone in the projection
    NAME: ClassVar[str] = "layernorm_reparameterisation"


@dataclass(frozen=True)
class ScaleSearch:
    """Scale and zero-point of every quantizer, without gradients.

    minmax and percentile read the range off the data; self_mse minimises the error of the tensor itself;
    output_mse goes on from there by turns over weights and inputs to minimise the error of the layer's output.
    """

    kind: Literal["scale_search"] = "scale_search"
    method: SearchMethod = "output_mse"
    images: int = 128
    candidates: int = 128
    rounds: int = 3
    percentile: float = 0.9999  # for method "percentile"
    narrowest: float = 0.9  # the quantile of |x| that the smallest candidate range still covers
    tokens: int = 4096  # rows drawn from the images to compare candidate activation scales on
    outlier_ratio: float = 20.0  # a layer input this much wider than its 99.9 % quantile is an outlier ...
    outlier_candidates: int = 0  # ... whose range is chosen among so many by the KL at the logits; 0 = never
    outlier_images: int = 32
    outlier_fit: bool = False  # for hidden channels: the range that fits the others best is one of the candidates
    outlier_copies: int = 1  # hidden channels that hold a massive one together, in the places of others
    NAME: ClassVar[str] = "scale_search"


@dataclass(frozen=True)
class ErrorCompensation:
    """Weights rounded column by column, the columns still free and the bias making up for the error of each."""

    kind: Literal["error_compensation"] = "error_compensation"
    images: int = 128
    tokens: int = 16384  # rows drawn from the images for the Gram matrix of a layer's inputs
    NAME: ClassVar[str] = "error_compensation"


@dataclass(frozen=True)
class BlockReconstruction:
    """Learned weights and activation scales, unit by unit, with QDrop (paper Sec. 3.2 and Algorithm 1).

    Weights learn their rounding, up or down from where they are, with a pull to either side (AdaRound).
    Given a `weight_lr` they learn straight through the rounding to the nearest instead, and may go to any code.
    Half-way between two codes such a weight goes to and fro with every batch, which is noise for all others;
    `settling` makes it stay where it is unless the gradient insists.
    """

    kind: Literal["block_reconstruction"] = "block_reconstruction"
    steps: int = 20_000
    batch: int = 32
    rounding_lr: float = 1e-3  # Adam, constant
    weight_lr: float = 0.0  # in steps of the weight's grid, cosine to zero; 0 learns the rounding, as published
    settling: float = 0.0  # with it, the share of the way to their codes that weights go per step, from half-time on
    scale_lr: float = 4e-5  # Adam, cosine to zero
    float_lr: float = 0.0  # of what stays in float (biases, norms), cosine to zero; 0 leaves it alone, as published
    quantized_share: float = 0.5  # QDrop inside the unit: the chance of an activation to be quantized
    input_quantized_share: float = 0.5  # QDrop at the unit's input: the chance of coming from the quantized prefix
    regulariser: float = 0.01  # pulls the rounding variables to 0 or 1
    warmup: float = 0.2  # share of the steps without the regulariser
    beta_start: float = 20.0  # exponent of the regulariser, linear from start to end after the warm-up
    beta_end: float = 2.0
    first_loss: float = 2.0  # the reconstruction loss is scaled to start here, whatever the unit
    zeta: float = 1.1  # stretch of the rectified sigmoid (AdaRound)
    gamma: float = -0.1
    importance: Importance = field(default_factory=Importance)
    views: Views = field(default_factory=Views)
    NAME: ClassVar[str] = "block_reconstruction"


@dataclass(frozen=True)
class JointTuning:
    """The whole quantized network tuned against the float teacher, at its logits and after every unit, on fresh views.

    All rates fall to zero along a cosine. Weights stay where they are unless they get a rate: on a thousand images they
    learn the images, while scales, biases and norms are too few to. If calibration images as they are come out further
    from the teacher than they went in, the network is put back as it was.
    """

    kind: Literal["joint_tuning"] = "joint_tuning"
    steps: int = 4000
    batch: int = 32
    scale_lr: float = 1e-3  # relative to the scale; of activations, and of weights that learn
    float_lr: float = 1e-3  # of what stays in float: biases, norms
    weight_lr: float = 0.0  # in steps of the weight's grid, straight through the rounding
    temperature: float = 1.0  # of the KL divergence at the logits
    logit_weight: float = 1.0  # of that divergence
    feature_weight: float = 5.0  # of the relative error of the units' outputs
    quantized_share: float = 1.0  # QDrop: the chance of an activation to be quantized
    views: Views = field(default_factory=lambda: Views(every=32, mixup=0.5, cutmix=0.5))
    NAME: ClassVar[str] = "joint_tuning"


Stage = (
    Rotation
    | MlpReconstruction
    | LayerNormReparameterisation
    | ScaleSearch
    | ErrorCompensation
    | BlockReconstruction
    | JointTuning
)
STAGES: dict[str, type[Stage]] = {cls.NAME: cls for cls in get_args(Stage)}  # in the order in which they run
