"""Latency profiler: how long operators take, on the host and on devices."""

from amanda_tools.latency.result import LatencyResult
from amanda_tools.latency.times import StepTime, ThreadTime, TimedOp, Times
from amanda_tools.latency.tool import Latency

__all__ = ["Latency", "LatencyResult", "StepTime", "ThreadTime", "TimedOp", "Times"]
