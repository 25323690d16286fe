"""Rotation: the residual stream and the attention heads in a basis without outlying channels, folded into the weights.

A LayerNorm without its affine commutes with every orthogonal matrix Q that leaves the all-ones vector where it is: the
mean and the length of a token stay the same. So once the affines are moved into the layers behind them, each layer that
writes to a stream gives Q times what it gave, each that reads takes Q^T first, and nothing else changes: the model
keeps its LayerNorms and its cost, and computes what it did. Inside a head, queries and keys turn together, and values
turn against the projection. Turned by a random Q, no channel stands out, so one scale fits all of them.

The teacher is turned with the student, because their outputs are compared unit by unit.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from aphq import settings
from aphq.engine.seeds import generator_for
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Stream
from aphq.models.attention import OpenAttention, Projection, open_attentions
from aphq.quant.layers import add_to_bias

log = logging.getLogger(__name__)


def rotate(work: Workspace, config: settings.Rotation) -> None:
    """The stage. It is quick and follows from the seed, so a run that goes on repeats it."""
    work.progress.start(config.NAME, 1)
    for model in (work.teacher, work.student):
        generator = generator_for(work.recipe.seed, config.NAME)
        if config.stream:
            if not work.streams:
                log.info("no residual stream of this model can be rotated as a whole; only its heads are")
            for stream in work.streams:
                turn_stream(model, stream, generator)
        if config.heads:
            for _, attention in open_attentions(model):
                turn_heads(attention, generator)
    work.progress.advance(1)
    work.progress.finish()


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """[size, size], double precision."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()  # without which it would not be uniform


def orthogonal_beside_ones(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix that maps the all-ones vector to itself."""
    whole = torch.eye(size, dtype=torch.float64)
    whole[1:, 1:] = random_orthogonal(size - 1, generator)
    normal = torch.full((size,), 1 / math.sqrt(size), dtype=torch.float64)
    normal[0] -= 1  # the mirror that swaps the ones' direction with the first axis
    if size > 1:
        normal /= normal.norm()
    mirror = torch.eye(size, dtype=torch.float64) - 2 * torch.outer(normal, normal)
    return mirror @ whole @ mirror


@torch.no_grad()
def turn_stream(model: nn.Module, stream: Stream, generator: torch.Generator) -> None:
    """Every writer, reader and constant of the stream, in place."""
    for scale, writer in stream.scales:
        fold_scale(model.get_parameter(scale), model.get_submodule(writer))
    width = len(model.get_submodule(stream.writers[0]).weight)  # type: ignore[arg-type]
    turn = orthogonal_beside_ones(width, generator)
    for name in stream.writers:
        write_turned(model.get_submodule(name), turn)
    for name in stream.constants:
        owner, _, parameter = name.rpartition(".")
        tensor: Any = getattr(model.get_submodule(owner), parameter)
        tensor.data = (tensor.double().cpu() @ turn.T).to(tensor)
    for reader in stream.readers:
        linears = [model.get_submodule(name) for name in reader.linears]
        fold_norm(model.get_submodule(reader.norm), linears)
        for linear in linears:
            read_turned(linear, torch.block_diag(*[turn] * reader.copies))


def fold_scale(scale: nn.Parameter, writer: Any) -> None:
    """The parameter of a LayerScale into the layer before it."""
    gamma = scale.data
    writer.weight.data = writer.weight.data * gamma[:, None]
    if writer.bias is not None:
        writer.bias.data = writer.bias.data * gamma
    scale.data = torch.ones_like(gamma)


def fold_norm(norm: Any, linears: list[Any]) -> None:
    """The affine of a norm into the layers behind it."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    for linear in linears:
        if bias is not None and bool(bias.any()):
            add_to_bias(linear, linear.weight.data @ bias.data)
        if weight is not None:
            linear.weight.data = linear.weight.data * weight.data
    if weight is not None:
        weight.data = torch.ones_like(weight)
    if bias is not None:
        bias.data = torch.zeros_like(bias)


def write_turned(layer: Any, turn: Tensor) -> None:
    """The layer gives `turn` times what it gave."""
    weight = layer.weight.data
    layer.weight.data = ((turn @ weight.flatten(1).double().cpu()).view(weight.shape)).to(weight)
    if layer.bias is not None:
        layer.bias.data = (turn @ layer.bias.data.double().cpu()).to(layer.bias)


def read_turned(layer: Any, turn: Tensor) -> None:
    """The layer takes `turn` times what it took."""
    layer.weight.data = (layer.weight.data.double().cpu() @ turn.T).to(layer.weight)


@torch.no_grad()
def turn_heads(attention: OpenAttention, generator: torch.Generator) -> None:
    """Queries with keys, and values against the projection, each head on its own; what is not free stays."""
    around, heads = attention.projections(), attention.num_heads
    if around is None:
        return
    size = around.output.weight.shape[1] // heads
    for_products = torch.block_diag(*(random_orthogonal(size, generator) for _ in range(heads)))
    for_values = torch.block_diag(*(random_orthogonal(size, generator) for _ in range(heads)))
    if attention.direct:
        write_turned_rows(around.query, for_products)
        write_turned_rows(around.key, for_products)
    if attention.direct_output:
        write_turned_rows(around.value, for_values)
        read_turned(around.output, for_values)


def write_turned_rows(part: Projection, turn: Tensor) -> None:
    """Some rows of a layer give `turn` times what they gave."""
    layer, rows = part.layer, part.rows
    layer.weight.data[rows] = (turn @ layer.weight.data[rows].double().cpu()).to(layer.weight)
    if layer.bias is not None:
        layer.bias.data[rows] = (turn @ layer.bias.data[rows].double().cpu()).to(layer.bias)
