"""What a reader must know of a projection's memory."""

from collections.abc import Sequence

from simulate.memory.peak import Memory
from simulate.plans.find import instead
from simulate.plans.remedies import Remedy, any_of
from spec.parallelism import Parallelism


def memory_notes(
    p: Parallelism, used: Memory, would_fit: Sequence[Remedy], enough: Parallelism | None
) -> list[str]:
    """One sentence each: what does not fit and what would, what is tight, what may not fit.

    enough: where no like plan fits, one on the fewest GPUs that do.
    """
    capacity_gib = used.capacity_gib
    if not used.fits:
        would = any_of(would_fit)
        return [
            f"Does not fit: a GPU of the fullest stage needs {used.needed_gib:.1f} GiB of "
            f"{capacity_gib:.1f} GiB, {used.needed_gib - capacity_gib:.1f} GiB too many.",
            f"What would fit {p.gpus} GPUs: {would}."
            if would
            else f"No like plan fits {p.gpus} GPUs; use {instead(enough, p)}.",
        ]
    if used.tight:
        return [
            "Memory is tight: the allocator must give back what it keeps, and steps may take "
            "longer than projected."
        ]
    most_gib = used.intervals()["device"]["high"]
    if p.cuda_graphs and most_gib > capacity_gib:
        return [
            f"Memory may not do: by its interval up to {most_gib:.1f} of {capacity_gib:.1f} GiB, "
            "and a CUDA graph gives nothing back."
        ]
    return []
