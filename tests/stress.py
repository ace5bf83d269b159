"""Runs the test suite again and again, each pass in another setting: `make stress-test`.

    python -m tests.stress [--only suite | core | NAME ...]

No test may depend on the clock, the load of the machine, the order of tests or a random draw. Each pass runs in a
random order whose seed is printed. Outcomes are kept below `build/stress`, in a folder named by the tree's hash: an
interrupted run resumes, and repeats the failed passes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
CLOCK = ROOT / "tests" / "clock_shift"
CORE = ("tests/unit", "tests/contract")
SHIFTS = (0.0, 5_476.1, 1e7)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)\b")
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run of pytest.

    Args:
        name: on the command line.
        tests: paths; none for the whole suite.
        options: of pytest; by default a test that is skipped because a program is missing fails.
        shift_seconds: added to `time.monotonic` in pytest and all Python processes that it starts.
        hash_seed: of Python's string hashes.
        num_busy: busy processes beside it, on the same processors.
        num_cores: processors of the tests and the busy processes together.
    """

    name: str
    tests: tuple[str, ...] = ()
    options: tuple[str, ...] = ("--require-all",)
    shift_seconds: float = 0.0
    hash_seed: int = 0
    num_busy: int = 0
    num_cores: int = 2

    @property
    def setting(self) -> str:
        """A description."""
        words = [f"clock +{self.shift_seconds:,.1f} s", f"hash seed {self.hash_seed}", f"{self.num_cores} cores"]
        return ", ".join(words + [f"{self.num_busy} busy beside"] * bool(self.num_busy))

    def command(self, seed: int) -> list[str]:
        """The command line of pytest; `seed` decides the order of the tests."""
        words = [sys.executable, "-m", "pytest", f"--randomly-seed={seed}", "--tb=short", "-p", "no:cacheprovider"]
        # By default xdist runs files with many tests first.
        words += ["--numprocesses", str(self.num_cores), "--dist", "loadfile", "--no-loadscope-reorder"]
        return [*words, *self.options, *self.tests]

    def environment(self) -> dict[str, str]:
        """Variables to add to this process' own."""
        paths = [str(CLOCK), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONHASHSEED": str(self.hash_seed),
            "ONWARD_CLOCK_SHIFT_SECONDS": str(self.shift_seconds),
        }


WHOLE = (
    *(Pass(name=f"suite-{number}", shift_seconds=shift) for number, shift in enumerate(SHIFTS, 1)),
    Pass(name="suite-4", num_busy=2),
    Pass(name="suite-5", hash_seed=5),
)
# All combinations of three clocks and three machines: two idle cores, two with a busy process, one with a busy process.
TWENTY = tuple(
    Pass(
        name=f"core-{number + 1}",
        tests=CORE,
        shift_seconds=SHIFTS[number % 3],
        hash_seed=number,
        num_busy=number % 2,
        num_cores=1 if number % 4 == 3 else 2,
    )
    for number in range(20)
)
GROUPS = {"core": TWENTY, "suite": WHOLE}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a pass ended: pytest's exit status, its counts by word, the failed tests, and how to repeat it."""

    name: str
    seed: int
    status: int
    seconds: float
    counts: dict[str, int]
    failures: tuple[str, ...]
    repeat: str

    @property
    def passed(self) -> bool:
        """Whether there were tests and every one passed."""
        return self.status == 0 and not self.failures and self.counts.get("passed", 0) > 0


def recorded(path: Path) -> Outcome | None:
    """The outcome in a file; None if there is none, or a torn one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Outcome(**{**found, "failures": tuple(found["failures"])})


def tree_of(root: Path) -> str:
    """The hash of all files of the working tree that git does not ignore."""
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "GIT_INDEX_FILE": f"{folder}/index"}
        for words in (["add", "--all"], ["write-tree"]):
            done = subprocess.run(["git", "-C", str(root), *words], env=environment, check=True, capture_output=True)
    return done.stdout.decode().strip()


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Limits this process, and those that it starts, to `count` processors.

    Raises:
        SystemExit: there are fewer.
    """
    before = os.sched_getaffinity(0)
    if len(before) < count:
        raise SystemExit(f"{count} processors are needed, there are {len(before)}")
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs `count` busy processes inside the block, at most as long as this process lives."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", program]))
            stack.callback(process.kill)
        yield


def check_clock(one: Pass, environment: dict[str, str]) -> None:
    """Checks that a Python process has the shifted clock.

    Raises:
        SystemExit: it has not.
    """
    # The real clock; this process' own may be shifted.
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    child = subprocess.run(
        [sys.executable, "-c", "import time; print(time.monotonic())"], env=environment, check=True, capture_output=True
    )
    moment = float(child.stdout) - one.shift_seconds
    # Two readings of one clock; at 10^7 seconds a float is exact to two nanoseconds.
    if not before - 1e-6 <= moment <= time.clock_gettime(time.CLOCK_MONOTONIC) + 1e-6:
        raise SystemExit(f"the clock of {one.name} is not shifted by {one.shift_seconds} s")


def run(one: Pass, seed: int, log: Path) -> Outcome:
    """Runs a pass; pytest's output goes to the log."""
    environment = {**os.environ, **one.environment()}
    command, began = one.command(seed), time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with on_cores(one.num_cores), log.open("w", encoding="utf-8") as file:
        check_clock(one, environment)
        with busy(one.num_busy):
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False)
    said = log.read_text(encoding="utf-8", errors="replace")
    variables = [f"{name}={value}" for name, value in one.environment().items()]
    return Outcome(
        name=one.name,
        seed=seed,
        status=done.returncode,
        seconds=round(time.monotonic() - began, 1),
        counts={word: int(count) for count, word in _COUNT.findall(said.rstrip().rpartition("\n")[2])},
        failures=tuple(dict.fromkeys(_FAILURE.findall(said))),
        repeat=shlex.join(["env", *variables, *command]),
    )


def report(one: Pass, outcome: Outcome) -> str:
    """A line per outcome; below a failure the tests and the command that repeats it."""
    counts = ", ".join(f"{count} {word}" for word, count in outcome.counts.items())
    head = (
        f"{'passed' if outcome.passed else 'FAILED'}  {one.name:<9} {outcome.seconds:6.0f} s  {counts}  ({one.setting})"
    )
    if outcome.passed:
        return head
    return "\n".join(
        [head, *(f"  {name}" for name in outcome.failures), f"  status {outcome.status}: {outcome.repeat}"]
    )


def main(arguments: Sequence[str] | None = None, folder: Path = ROOT / "build" / "stress") -> int:
    """Runs the passes that have not passed on this tree; 0 when all have."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__.splitlines()[0])
    names = [*GROUPS, *(one.name for group in GROUPS.values() for one in group)]
    parser.add_argument("--only", nargs="+", choices=names, default=list(GROUPS), help="passes, by group or name")
    only = parser.parse_args(arguments).only
    passes = [one for name, group in GROUPS.items() for one in group if name in only or one.name in only]
    tree = tree_of(ROOT)
    folder /= tree
    outcomes: list[Outcome] = []
    for number, one in enumerate(passes, 1):
        kept = folder / f"{one.name}.json"
        outcome = recorded(kept)
        if outcome is None or not outcome.passed:
            seed = random.SystemRandom().getrandbits(32)
            print(f"[{number}/{len(passes)}] {one.name}: {one.setting}, order {seed}", file=sys.stderr, flush=True)
            outcome = run(one, seed, folder / f"{one.name}.log")
            if tree_of(ROOT) != tree:
                raise SystemExit(f"the tree changed during {one.name}: its outcome is of no tree")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
            print(report(one, outcome), file=sys.stderr, flush=True)
        outcomes.append(outcome)
    for one, outcome in zip(passes, outcomes, strict=True):
        print(report(one, outcome))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
