"""The steps of the pipeline; a stage is a function of the workspace and its settings, one file each."""

from collections.abc import Callable
from typing import Any

from aphq.engine.workspace import Workspace
from aphq.recipe import (
    BlockReconstruction,
    ErrorCompensation,
    JointTuning,
    LayerNormReparameterisation,
    MlpReconstruction,
    Rotation,
    ScaleSearch,
)
from aphq.stages.block_reconstruction import reconstruct_blocks
from aphq.stages.error_compensation import compensate_errors
from aphq.stages.joint_tuning import tune_jointly
from aphq.stages.layernorm import reparameterise_norms
from aphq.stages.mlp_reconstruction import reconstruct_mlps
from aphq.stages.rotation import rotate
from aphq.stages.scale_search import search_scales

RUN_STAGE: dict[type, Callable[[Workspace, Any], None]] = {
    Rotation: rotate,
    MlpReconstruction: reconstruct_mlps,
    LayerNormReparameterisation: reparameterise_norms,
    ScaleSearch: search_scales,
    ErrorCompensation: compensate_errors,
    BlockReconstruction: reconstruct_blocks,
    JointTuning: tune_jointly,
}
