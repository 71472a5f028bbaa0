"""Effective paths: which neurons, synapses and weights determine a prediction."""

from amanda_tools.effective_path.result import EffectivePathResult, LayerSum, PathSets, Thresholds
from amanda_tools.effective_path.tool import EffectivePath

__all__ = ["EffectivePath", "EffectivePathResult", "LayerSum", "PathSets", "Thresholds"]
