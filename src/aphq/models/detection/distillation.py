"""How far a quantized detector is from its float teacher, on the teacher's own regions.

Classification by KL divergence: objectness of every anchor, classes of every region (RoI), and every pixel of the
teacher's masks. Boxes by smooth L1, only where the teacher is confident that there is an object: elsewhere their deltas
mean nothing. Every term is a mean over what it is about, and one without anything to be about is zero. A prediction
that lacks some outputs (that of a single head) is compared on those it has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aphq.models.architecture import State
from aphq.models.distillation import softmax_probe

CONFIDENT_ANCHOR = 0.7  # objectness from which an anchor's box counts
CONFIDENT_REGION = 0.5  # probability of a class from which a region's box counts
BETA = 1.0  # smooth L1 is quadratic below


class DetectionDistillation:
    """Predictions are states with `rpn.cls` [anchors], `rpn.reg` [anchors, 4], and for each head s `box.s.cls`
    [regions, classes + 1], `box.s.reg` [regions, 4 * classes] and `mask.s` [masks, 28, 28]."""

    def loss(self, prediction: State, teacher: State, temperature: float = 1.0) -> Tensor:
        """The sum of all terms. Probabilities are taken as they are, at any `temperature`: nearly all anchors and
        regions are background, and softened they would drown the few objects."""
        terms = []
        if "rpn.cls" in prediction:
            logits, boxes = teacher["rpn.cls"], teacher["rpn.reg"]
            objects = logits.sigmoid().sum().clamp_min(1)  # expected
            terms.append(binary_divergence(prediction["rpn.cls"], logits).sum() / objects)
            weight = confident_anchors(logits)
            terms.append(box_distance(prediction["rpn.reg"], boxes, weight))
        for head in heads(prediction, "box"):
            logits = teacher[f"box.{head}.cls"]
            ours = F.log_softmax(prediction[f"box.{head}.cls"], dim=1)
            divergence = F.kl_div(ours, F.log_softmax(logits, dim=1), reduction="sum", log_target=True)
            terms.append(divergence / max(1, len(logits)))
            ours, theirs = (state[f"box.{head}.reg"].unflatten(1, (-1, 4)) for state in (prediction, teacher))
            terms.append(box_distance(ours, theirs, confident_regions(logits)))
        for head in heads(prediction, "mask"):
            logits = teacher[f"mask.{head}"]
            terms.append(binary_divergence(prediction[f"mask.{head}"], logits).sum() / max(1, logits.numel()))
        return torch.stack(terms).sum()

    def probe(self, prediction: State, temperature: float, generator: torch.Generator) -> State:
        """Random vectors whose covariance is the curvature of the loss where student and teacher agree."""

        def normal(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator).to(like)

        found = {}
        if "rpn.cls" in prediction:
            p = prediction["rpn.cls"].sigmoid()
            found["rpn.cls"] = normal(p) * (p * (1 - p) / p.sum().clamp_min(1)).sqrt()
            found["rpn.reg"] = normal(prediction["rpn.reg"]) * confident_anchors(prediction["rpn.cls"]).sqrt()[:, None]
        for head in heads(prediction, "box"):
            logits = prediction[f"box.{head}.cls"]
            found[f"box.{head}.cls"] = softmax_probe(logits, generator) / max(1, len(logits)) ** 0.5
            deltas = prediction[f"box.{head}.reg"].unflatten(1, (-1, 4))
            found[f"box.{head}.reg"] = (normal(deltas) * confident_regions(logits).sqrt()[..., None]).flatten(1)
        for head in heads(prediction, "mask"):
            p = prediction[f"mask.{head}"].sigmoid()
            found[f"mask.{head}"] = normal(p) * (p * (1 - p) / max(1, p.numel())).sqrt()
        return found


def heads(prediction: State, kind: str) -> list[str]:
    """The numbers of the box or mask heads whose outputs are there."""
    return sorted({name.split(".")[1] for name in prediction if name.startswith(f"{kind}.")})


def binary_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL of two-way distributions given by logits, element by element."""
    p = teacher.sigmoid()
    yes = F.logsigmoid(teacher) - F.logsigmoid(logits)
    no = F.logsigmoid(-teacher) - F.logsigmoid(-logits)
    return p * yes + (1 - p) * no


def confident_anchors(logits: Tensor) -> Tensor:
    """[anchors] weights that add up to 1, or to 0 if the teacher is confident of none."""
    chosen = (logits.sigmoid() > CONFIDENT_ANCHOR).to(logits)
    return chosen / chosen.sum().clamp_min(1)


def confident_regions(logits: Tensor) -> Tensor:
    """[regions, classes] weights, at the class the teacher is confident of, that add up to 1 or to 0."""
    chosen = (logits.softmax(dim=1)[:, :-1] > CONFIDENT_REGION).to(logits)
    return chosen / chosen.sum().clamp_min(1)


def box_distance(deltas: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum over boxes [..., 4] of the smooth L1 of their deltas."""
    return (F.smooth_l1_loss(deltas, teacher, reduction="none", beta=BETA).sum(-1) * weight).sum()


DETECTIONS = DetectionDistillation()
