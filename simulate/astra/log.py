"""What Astra-Sim prints, read line by line; 1 cycle is 1 ns."""

import re
from dataclasses import dataclass, field

_FINISHED = re.compile(
    r"sys\[(\d{1,9})\] finished, (\d{1,18}) cycles, exposed communication (-?\d{1,18}) cycles"
)
_FIGURE = re.compile(r"sys\[(\d{1,9})\], (Wall time|GPU time): (\d{1,18})\s*$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TROUBLE = ("critical", "unreleased nodes", "error", "terminate called", "assertion", "exception")
_KEPT_TROUBLES = 20


@dataclass(slots=True)
class AstraLog:
    """A log as far as it has been read.

    `wall_ns` and `gpu_ns` are of Astra-Sim's own closing statistics; its "exposed communication" is
    finish minus compute, bubbles included, so it is not kept.
    """

    cycles: dict[int, int] = field(default_factory=dict)  # rank -> ns at which it finished
    wall_ns: dict[int, int] = field(default_factory=dict)
    gpu_ns: dict[int, int] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)  # lines that tell of one
    repeated: set[int] = field(default_factory=set)  # ranks that finished twice

    def feed(self, line: str) -> None:
        """Take one line; what is no news of a rank or of trouble is passed over."""
        if found := _FINISHED.search(line):
            rank = int(found[1])
            if rank in self.cycles:
                self.repeated.add(rank)
            self.cycles[rank] = int(found[2])
        elif found := _FIGURE.search(line):
            into = self.wall_ns if found[2] == "Wall time" else self.gpu_ns
            into[int(found[1])] = int(found[3])
        elif len(self.troubles) < _KEPT_TROUBLES:
            low = line.lower()
            if any(word in low for word in _TROUBLE) or "[c]" in low[:40] or "[e]" in low[:40]:
                self.troubles.append(_COLOUR.sub("", line).strip()[:300])

    def problem(self, npus: int) -> str | None:
        """What is wrong with a log that has ended, in a sentence; None if nothing is."""
        said = f" It printed: {self.troubles[0]}" if self.troubles else ""
        strange = [rank for rank in self.cycles if rank >= npus]
        if strange:
            return f"it reports rank {strange[0]}, but the network has {npus}.{said}"
        if self.repeated:
            return f"rank {min(self.repeated)} reports that it finished twice.{said}"
        missing = [rank for rank in range(npus) if rank not in self.cycles]
        if missing:
            some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            return (
                f"{len(missing)} of {npus} ranks never finished (rank {some}): the workload waits "
                f"for itself, or Astra-Sim stopped early; it exits 0 either way.{said}"
            )
        lost = [rank for rank in range(npus) if rank not in self.wall_ns]
        if lost:
            return f"the closing statistics of rank {lost[0]} are missing.{said}"
        if self.troubles:
            return f"it printed: {self.troubles[0]}"
        return None
