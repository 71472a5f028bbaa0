"""Dynamic pruning: what is computed depends on the input, as learned gates decide."""

from amanda_tools.gating.channels import PruneChannels
