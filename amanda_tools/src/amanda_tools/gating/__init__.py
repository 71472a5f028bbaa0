"""Dynamic pruning: what is computed depends on the input, as learned gates decide."""

from amanda_tools.gating.blocks import PruneAttention
from amanda_tools.gating.channels import PruneChannels
from amanda_tools.gating.positions import PrunePositions
from amanda_tools.gating.result import GatedOp, GatingResult

__all__ = ["GatedOp", "GatingResult", "PruneAttention", "PruneChannels", "PrunePositions"]
