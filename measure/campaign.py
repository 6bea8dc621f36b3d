"""One run in progress: hands cases to workers, stores what comes back, stays within its time."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from measure import checks, heat, nccl_choice, placement
from measure.budget import OWN_PROCESSES, START_S, order, share_s
from measure.devices import Device
from measure.plan import CollectiveCase, InterferenceCase, KernelCase
from measure.store import Store, write_links
from measure.telemetry import Sampler
from measure.window import Window
from measure.workers import Pool
from spec.errors import UserError, WorkError
from spec.records import KernelRow


@dataclass
class Campaign:
    """One run in progress."""

    kind: str
    devices: Sequence[Device]
    store: Store
    sampler: Sampler
    show: Callable[[str, int], None]
    deadline: float | None = None  # monotonic seconds
    nodes: int = 1  # emulated on this host
    out_of_time: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def admit(self, seconds: float, until: float | None) -> bool:
        """Whether a case of `seconds` still fits before `until`."""
        if until is None or time.monotonic() + seconds <= until:
            return True
        self.out_of_time += 1
        return False

    def fail(self, case_id: str, reason: str) -> None:
        """Record a failed case; a resumed run tries it again."""
        self.failed[case_id] = reason
        self.store.skip(case_id, f"failed: {reason}")
        self.store.save()

    def kernels(self, pool: Pool, cases: Sequence[KernelCase], until: float | None) -> None:
        """Share the cases among the devices."""

        def begin(rank: int, case: KernelCase) -> None:
            self.sampler.tag(case.case_id, rank)

        def finish(rank: int, case: KernelCase, reply: dict[str, Any]) -> None:
            self.sampler.tag("", rank)
            if "row" in reply:
                self.store.append("kernels", [KernelRow.model_validate(reply["row"])])
            elif "skip" in reply:
                self.store.skip(case.case_id, reply["skip"])
            else:
                self.fail(case.case_id, reply["error"])
            self.show(case.case_id, 1)

        pool.each(
            cases,
            begin,
            finish,
            pinned=lambda case: case.prefer if case.device is None else case.device,
            admit=lambda case: self.admit(case.seconds, until),
        )

    def collectives(self, pool: Pool, cases: Sequence[CollectiveCase], until: float | None) -> None:
        """One after the other, all devices at once."""
        from measure.collectives import group_times_us, row

        choices = self._choices(pool, cases, until)
        sent = [one.bytes for one in cases if one.collective == "send_recv" and one.groups > 1]
        largest = max(sent, default=0)
        for case in cases:
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                replies = pool.together(case)
                if isinstance(replies, str):
                    self.fail(case.case_id, replies)
                else:
                    if case.collective == "send_recv" and case.bytes == largest:
                        times = group_times_us(case.message(), replies)
                        if times:
                            write_links(self.store.folder, case.case_id, times)
                    measured = row(case.message(), case.role, self.kind, replies)
                    algorithm, protocol = choices.get(case.case_id, (None, None))
                    more = {"algorithm": algorithm, "protocol": protocol}
                    self.store.append("collectives", [measured.model_copy(update=more)])
            self.show(case.case_id, 1)

    def _choices(
        self, pool: Pool, cases: Sequence[CollectiveCase], until: float | None
    ) -> dict[str, nccl_choice.Choice]:
        """What NCCL says it runs for each case, where there is NCCL and time to ask it."""
        asked = nccl_choice.wanted(cases) if self.kind in START_S else []
        need = START_S.get(self.kind, 0.0) + sum(case.seconds for case in asked)
        if not asked or (until is not None and time.monotonic() + 5 * need > until):
            return {}
        with self._tagged("nccl-choice"):  # or its power would pass for idle
            choices, problem = nccl_choice.read_choices(self.kind, pool.world, self.nodes, asked)
        if problem is not None:
            self.store.note(problem)
        return choices

    def interference(
        self, pool: Pool, cases: Sequence[InterferenceCase], until: float | None
    ) -> None:
        """One after the other, all devices at once."""
        from measure.interference import row

        for case in cases:
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                replies = pool.together(case)
                try:
                    if isinstance(replies, str):
                        raise WorkError(replies)
                    self.store.append("interference", [row(case.message(), replies)])
                except WorkError as error:
                    self.fail(case.case_id, str(error))
            self.show(case.case_id, 1)

    def training(self, cases: Sequence[Any], until: float | None) -> None:
        """Each in fresh processes of its own, which measure.training starts."""
        from measure.training import run_case

        for case in self._that_fit(cases):
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                try:
                    row, steps = run_case(
                        case,
                        window=partial(Window, self.devices[: case.gpus]),
                        device_kind=self.kind,
                    )
                    # steps first: their configuration's row is what marks the case as done
                    self.store.append("steps", steps)
                    self.store.append("training", [row])
                    if row.status == "failed":
                        self.failed[case.case_id] = row.error or "failed"
                except UserError as error:
                    self.store.skip(case.case_id, str(error))
                except Exception as error:  # whatever a case does, the run goes on
                    self.fail(case.case_id, f"{type(error).__name__}: {error}")
            self.show(case.case_id, 1)

    def _that_fit(self, cases: Sequence[Any]) -> Iterator[Any]:
        """The training cases that this machine has devices for; the others are skipped."""
        here = len(self.devices)
        for case in cases:
            if case.gpus <= here:
                yield case
            else:
                self.store.skip(case.case_id, f"needs {case.gpus} devices; {here} are here")
                self.show(case.case_id, 1)

    def profile(self, cases: Sequence[Any], until: float | None) -> None:
        """Training cases again, in fresh processes under a profiler."""
        from measure.training_profile import run_profile

        for case in self._that_fit(cases):
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                try:
                    rows = run_profile(case, device_kind=self.kind)
                    self.store.append("profile", rows)
                except UserError as error:
                    self.store.skip(case.case_id, str(error))
                except Exception as error:  # whatever a case does, the run goes on
                    self.fail(case.case_id, f"{type(error).__name__}: {error}")
            self.show(case.case_id, 1)

    def telemetry(self, pool: Pool, cases: Sequence[checks.LoadCase], until: float | None) -> None:
        """The sampler's cost and truth, into a file of their own."""
        for case in cases:
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                try:
                    checks.measure(case, self.devices, pool, self.sampler, self.store.folder)
                    self.store.mark("telemetry", [case.case_id])
                except WorkError as error:
                    self.fail(case.case_id, str(error))
            self.show(case.case_id, 1)

    def heat(self, pool: Pool, cases: Sequence[heat.HeatCase], until: float | None) -> None:
        """Constant and pulsed load of all devices."""
        pool.start()  # not within a case: its telemetry is the load's from the first second
        for case in cases:
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                try:
                    self.store.append("heat", [heat.measure(case, self.devices, pool)])
                except WorkError as error:
                    self.fail(case.case_id, str(error))
            self.show(case.case_id, 1)

    def placement(self, cases: Sequence[placement.PlacementCase], until: float | None) -> None:
        """In processes of its own: the symmetric pipeline beside the one predicted to be best."""
        for case in cases:
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                try:
                    placement.measure(case, self.devices, self.kind, self.store)
                    self.store.mark("placement", [case.case_id])
                except (UserError, WorkError) as error:
                    self.fail(case.case_id, str(error))
            self.show(case.case_id, 1)

    @contextlib.contextmanager
    def _tagged(self, case_id: str) -> Iterator[None]:
        self.sampler.tag(case_id)
        try:
            yield
        finally:
            self.sampler.tag("")


def measure_all(campaign: Campaign, cases: dict[str, list[Any]], world: int) -> None:
    """Run all suites; with a deadline, each gets its share of the time that is left."""
    pool = Pool(campaign.kind, world, nodes=campaign.nodes)
    try:
        for suite, todo in cases.items():
            if not todo:
                continue
            until = campaign.deadline
            if until is not None:
                left = until - time.monotonic()
                until = time.monotonic() + share_s(suite, cases, left, campaign.kind, world)
            if until is not None and until - time.monotonic() < min(one.seconds for one in todo):
                campaign.out_of_time += len(todo)  # not even workers are started for it
                continue
            if until is not None:
                todo = order(suite, todo)
            if suite in OWN_PROCESSES:
                pool.close()  # free the devices' memory
                getattr(campaign, suite)(todo, until)
            else:
                getattr(campaign, suite)(pool, todo, until)
            campaign.store.save()
    finally:
        pool.close()
