"""One operator of a recorded run, executed again from its recorded inputs."""

from amanda_tools.replay.replaying import replay
from amanda_tools.replay.result import Replayed, ReplayResult

__all__ = ["ReplayResult", "Replayed", "replay"]
