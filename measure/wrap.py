"""Telemetry around any command: `python -m measure.run --wrap -- COMMAND`.

The command runs as it would alone: its environment is not touched, its output is its own and its
exit status is passed on. Under torchrun or srun one rank of each host records, the others only run
the command.
"""

import argparse
import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure.devices import Device
from measure.hosts import about as host
from measure.hosts.window import Window, WindowResult
from measure.store.write import Store
from measure.telemetry.handle import Sampler
from spec.command import Parser, emit
from spec.errors import UserError
from spec.files import write_json

FILE = "wrap.json"
CASE = "wrapped"
NO_EFFECT = (
    *("suite", "plan", "write_plan", "resume", "budget", "emulate_nodes", "gpus", "model", "list"),
    *("quick", "hosts", "node_cores", "link_mbit"),
)
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL)", re.IGNORECASE)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and those behind `--`."""
    words = list(words)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def check(options: Parser, asked: argparse.Namespace, command: Sequence[str]) -> None:
    """Raise UserError where `--wrap` and what stands behind `--` do not belong together."""
    if command and not asked.wrap:
        raise UserError("words after -- are a command to --wrap; give --wrap or leave them out")
    if not asked.wrap:
        return
    if not command:
        raise UserError("--wrap needs a command: python -m measure.run --wrap -- COMMAND")
    options.refuse_given(asked, NO_EFFECT, "with --wrap")


def masked(command: Sequence[str]) -> list[str]:
    """The command for the manifest: values of words that look like secrets are left out."""
    words, hidden = [], False
    for word in command:
        words.append("..." if hidden else word)
        hidden = False
        if _SECRET.search(word):
            name, equals, _ = word.partition("=")
            words[-1] = f"{name}=..." if equals else word
            hidden = not equals and word.startswith("-")
    return words


def wrap(
    asked: argparse.Namespace, command: Sequence[str], devices: Sequence[Device], kind: str
) -> int:
    """Run the command with telemetry beside it; its exit status."""
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}: cannot be run; no such program")
    rank = host.launch().rank
    described = host.describe_host(devices)
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S") + (f"-rank{rank}" if rank else "")
    store = Store.create(
        Path(asked.out),
        system=asked.system or host.system_name([described]),
        run=name,
        hosts=[described],
        interconnect=host.interconnect(devices),
        software=host.software(),
        environment=host.environment(),
        command=host.command_line(["--wrap", "--", *masked(command)]),
        suites=[],
        numbered=True,
    )
    epoch = datetime.fromisoformat(store.manifest.started).timestamp()
    sampler = Sampler(store.folder, kind, epoch=epoch)
    status, state = None, None
    try:
        sampler.tag(CASE)
        with Window(devices) as window:
            status = run_command(command, to_stderr=asked.json == "-")
        state = window.result
    finally:
        sampler.stop()
        for sentence in sampler.notes:
            store.note(sentence)
        value = summary(status, state, store)
        write_json(store.folder / FILE, value)
        store.save("complete" if status == 0 else "partial")
    say(asked.json, value)
    return status


def run_command(command: Sequence[str], to_stderr: bool) -> int:
    """Run it to its end; 128 + the signal's number where one ended it, as shells say it."""
    try:
        process = subprocess.Popen(list(command), stdout=sys.stderr if to_stderr else None)
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be run ({error.strerror})") from None
    with _passing_signals(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _passing_signals(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """The command decides when it ends: it gets SIGTERM from here, Ctrl-C from the terminal."""

    def terminate(*_: Any) -> None:
        process.terminate()

    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: terminate}
    # what a shell had its background jobs ignore stays ignored
    handlers = {n: one for n, one in handlers.items() if signal.getsignal(n) != signal.SIG_IGN}
    before = {number: signal.signal(number, one) for number, one in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def summary(status: int | None, state: WindowResult | None, store: Store) -> dict[str, Any]:
    """What wrap.json holds."""
    known = asdict(state) if state else {}
    return {
        "schema": "measure-wrap/1",
        "path": str(store.folder),
        "system": store.manifest.system,
        "run": store.manifest.run,
        "exit_status": status,
        **known,
    }


def say(target: str | None, value: dict[str, Any]) -> None:
    """The short report, on standard error: standard output is the command's."""
    parts = [f"{value['seconds']:.1f} s", f"exit status {value['exit_status']}"]
    for key, text in (
        ("energy_j", "{:.0f} J on all devices"),
        ("power_mean_w", "{:.0f} W on each"),
        ("clock_mean_mhz", "{:.0f} MHz"),
        ("temperature_max_c", "at most {:.0f} C"),
        ("throttle", "throttled: {}"),
    ):
        if value.get(key) is not None:
            parts.append(text.format(value[key]))
    print(f"{', '.join(parts)}: {value['path']}", file=sys.stderr)
    if target == "-":
        emit(target, value, "")
    elif target is not None:
        write_json(Path(target), value)
