"""One run in progress: hands cases to workers, stores what comes back, stays within its time."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from measure.budget import OWN_PROCESSES, SHARED, START_S, order, share_s
from measure.checks import suite as checks
from measure.devices import Device
from measure.hosts.others import OtherHost, Samplers
from measure.hosts.window import Window
from measure.hosts.workers import Pool
from measure.plans.cases import BehindCase, CollectiveCase, InterferenceCase
from measure.plans.late import LateCase
from measure.store.write import Store, seconds_since, write_links
from measure.suites import heat, host_time, nccl_choice, placement
from measure.suites.awake import AwakeCase
from spec.errors import UserError, WorkError
from spec.records import TABLES
from spec.row import Row


@dataclass
class Campaign:
    """One run in progress."""

    kind: str
    devices: Sequence[Device]
    store: Store
    sampler: Samplers
    show: Callable[[str, int], None]
    deadline: float | None = None  # monotonic seconds
    nodes: int = 1  # emulated on this host
    others: Sequence[OtherHost] = ()  # `devices` are of all hosts
    out_of_time: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._noted: set[int] = set()

    @property
    def living(self) -> list[Device]:
        """The devices whose hosts are there; a host that is lost is noted."""
        for host in self.others:
            if host.lost and host.node not in self._noted:
                self._noted.add(host.node)
                after = seconds_since(self.store.manifest.started)
                self.store.note(
                    f"host {host.node} was lost {after:.0f} s into the run; its "
                    f"{len(host.devices)} devices did no more"
                )
        return [one for one in self.devices if one.host is None or not one.host.lost]

    @property
    def local(self) -> list[Device]:
        """The devices of this host."""
        return [one for one in self.devices if one.host is None]

    def lacks(self, case_id: str, devices: int) -> bool:
        """Whether there are fewer devices; such a case is skipped, with the reason."""
        here = len(self.living)
        if devices <= here:
            return False
        where = "are here" if here == len(self.devices) else "are left after a host was lost"
        self.store.skip(case_id, f"needs {devices} devices; {here} {where}")
        self.show(case_id, 1)
        return True

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

    def each(self, table: str, pool: Pool, cases: Sequence[Any], until: float | None) -> None:
        """Cases that need one device, shared among the devices, into the table of their suite."""

        def begin(device: int, case: Any) -> None:
            self.sampler.tag(case.case_id, device)

        def finish(device: int, case: Any, reply: dict[str, Any]) -> None:
            self.sampler.tag("", device)
            if "row" in reply:
                row = TABLES[table].model_validate(reply["row"] | {"device": device})
                self.store.append(table, [row])
            elif "skip" in reply:
                self.store.skip(case.case_id, reply["skip"])
            else:
                self.fail(case.case_id, reply["error"])
            self.show(case.case_id, 1)

        left = pool.each(
            cases,
            begin,
            finish,
            pinned=lambda case: case.prefer if case.device is None else case.device,
            admit=lambda case: self.admit(case.seconds, until),
        )
        for case in left:
            self.fail(case.case_id, "the host of its device was lost")
            self.show(case.case_id, 1)

    def host(self, cases: Sequence[host_time.HostCase], until: float | None) -> None:
        """Each in processes of its own, on this host's first devices."""
        for case in cases:
            if not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                try:
                    row = host_time.measure(case, self.kind, self.local[: case.gpus])
                    self.store.append("host", [row])
                except UserError as error:
                    self.store.skip(case.case_id, str(error))
                except WorkError as error:
                    self.fail(case.case_id, str(error))
            self.show(case.case_id, 1)

    def collectives(self, pool: Pool, cases: Sequence[CollectiveCase], until: float | None) -> None:
        """One after the other, all devices at once."""
        from measure.suites.collectives import group_times_us, row

        choices = self._choices(pool, cases, until)
        sent = [one.bytes for one in cases if one.collective == "send_recv" and one.groups > 1]
        largest = max(sent, default=0)
        for case in cases:
            if self.lacks(case.case_id, case.devices) or not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                replies = pool.together(case)
                if isinstance(replies, str):
                    self.fail(case.case_id, replies)
                else:
                    if case.collective == "send_recv" and case.bytes == largest:
                        times = group_times_us(case.message(), replies)
                        if times:
                            by_device = {
                                tuple(map(pool.device_of, ranks)): time_us
                                for ranks, time_us in times.items()
                            }
                            write_links(self.store.folder, case.case_id, by_device)
                    measured = row(case.message(), case.role, self.kind, replies)
                    algorithm, protocol = choices.get(case.case_id, (None, None))
                    more = {"algorithm": algorithm, "protocol": protocol}
                    self.store.append("collectives", [measured.model_copy(update=more)])
            self.show(case.case_id, 1)

    def _choices(
        self, pool: Pool, cases: Sequence[CollectiveCase], until: float | None
    ) -> dict[str, nccl_choice.Choice]:
        """What NCCL says it runs for each case, where there is NCCL and time to ask it."""
        fitting = [case for case in cases if case.devices <= pool.world]
        asked = nccl_choice.wanted(fitting) if self.kind in START_S else []
        need = START_S.get(self.kind, 0.0) + sum(case.seconds for case in asked)
        if not asked or (until is not None and time.monotonic() + 5 * need > until):
            return {}
        with self._tagged("nccl-choice"):  # or its power would pass for idle
            choices, problem = nccl_choice.read_choices(
                self.kind, pool.world, self.nodes, asked, devices=self.living
            )
        if problem is not None:
            self.store.note(problem)
        return choices

    def interference(
        self, pool: Pool, cases: Sequence[InterferenceCase], until: float | None
    ) -> None:
        """One after the other, all devices at once."""
        from measure.suites.interference import row

        self._together("interference", pool, cases, until, row)

    def late(self, pool: Pool, cases: Sequence[LateCase], until: float | None) -> None:
        """One after the other, two devices each."""
        from measure.suites.late import row

        self._together("late", pool, cases, until, row)

    def awake(self, pool: Pool, cases: Sequence[AwakeCase], until: float | None) -> None:
        """One after the other, all devices at once."""
        from measure.suites.awake import row

        self._together("awake", pool, cases, until, row)

    def behind(self, cases: Sequence[BehindCase], until: float | None) -> None:
        """The same, by workers whose devices have one queue."""
        from measure.suites.behind import row
        from measure.training.processes import ONE_QUEUE

        world, devices = len(self.devices), self.devices
        with contextlib.closing(
            Pool(self.kind, world, nodes=self.nodes, environment=ONE_QUEUE, devices=devices)
        ) as pool:
            self._together("behind", pool, cases, until, row)

    def _together(
        self,
        table: str,
        pool: Pool,
        cases: Sequence[InterferenceCase | LateCase | AwakeCase],
        until: float | None,
        row: Callable[[dict[str, Any], list[dict[str, Any]]], Row],
    ) -> None:
        """Cases of all devices, into a table of theirs."""
        for case in cases:
            if self.lacks(case.case_id, case.ranks) or not self.admit(case.seconds, until):
                continue
            with self._tagged(case.case_id):
                replies = pool.together(case)
                try:
                    if isinstance(replies, str):
                        raise WorkError(replies)
                    skipped = [one["skip"] for one in replies if "skip" in one]
                    if skipped:
                        self.store.skip(case.case_id, skipped[0])
                    else:
                        self.store.append(table, [row(case.message(), replies)])
                except WorkError as error:
                    self.fail(case.case_id, str(error))
            self.show(case.case_id, 1)

    def training(self, cases: Sequence[Any], until: float | None) -> None:
        """Each in fresh processes of its own, which measure.training.steps starts."""
        from measure.training.steps import run_case

        for case in cases:
            if self.lacks(case.case_id, case.gpus) or not self.admit(case.seconds, until):
                continue
            devices = self.living[: case.gpus]
            with self._tagged(case.case_id):
                try:
                    row, steps = run_case(
                        case,
                        window=partial(Window, devices),
                        device_kind=self.kind,
                        devices=devices,
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

    def profile(self, cases: Sequence[Any], until: float | None) -> None:
        """Training cases again, in fresh processes under a profiler."""
        from measure.training.profile import run_profile

        for case in cases:
            if self.lacks(case.case_id, case.gpus) or not self.admit(case.seconds, until):
                continue
            devices = self.living[: case.gpus]
            with self._tagged(case.case_id):
                try:
                    rows = run_profile(case, device_kind=self.kind, devices=devices)
                    self.store.append("profile", rows)
                except UserError as error:
                    self.store.skip(case.case_id, str(error))
                except Exception as error:  # whatever a case does, the run goes on
                    self.fail(case.case_id, f"{type(error).__name__}: {error}")
            self.show(case.case_id, 1)

    def telemetry(self, pool: Pool, cases: Sequence[checks.LoadCase], until: float | None) -> None:
        """The sampler's cost and truth on this host, into a file of their own."""
        if self.others:  # which do nothing meanwhile
            pool.close()
            pool = Pool(self.kind, len(self.local))
        with contextlib.closing(pool):
            for case in cases:
                if not self.admit(case.seconds, until):
                    continue
                with self._tagged(case.case_id):
                    try:
                        checks.measure(case, self.local, pool, self.sampler.own, self.store.folder)
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
                    self.store.append("heat", [heat.measure(case, self.living, pool)])
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
                    placement.measure(case, self.living, self.kind, self.store)
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


def measure_all(campaign: Campaign, cases: dict[str, list[Any]]) -> None:
    """Run all suites; with a deadline, each gets its share of the time that is left."""
    world = len(campaign.devices)
    pool = Pool(campaign.kind, world, nodes=campaign.nodes, devices=campaign.devices)
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
            if suite in SHARED:
                campaign.each(suite, pool, todo, until)
            elif suite in OWN_PROCESSES:
                pool.close()  # free the devices' memory
                getattr(campaign, suite)(todo, until)
            else:
                getattr(campaign, suite)(pool, todo, until)
            campaign.store.save()
    finally:
        pool.close()
