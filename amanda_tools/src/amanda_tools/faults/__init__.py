"""Fault injection: single wrong elements or bits, and campaigns that measure what they change."""

from amanda_tools.faults.campaign import CampaignResult, Trial, run_campaign, wilson_interval
from amanda_tools.faults.result import Fault, FaultSite, FaultsResult
from amanda_tools.faults.tool import InjectFaults

__all__ = [
    "CampaignResult",
    "Fault",
    "FaultSite",
    "FaultsResult",
    "InjectFaults",
    "Trial",
    "run_campaign",
    "wilson_interval",
]
