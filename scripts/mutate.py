"""Checks that tests find bugs: each named mutation of the source must make a named test fail within a time limit.

    python scripts/mutate.py [--jobs 2] [--after-tests] [--list] [NAME ...]

A mutation is applied to a copy of `src` in a temporary folder, and its test runs against that copy in a separate
process. Before that, all named tests must pass against an unchanged copy. With `--after-tests`, for a checkout whose
tests have just passed, only one named test of each file must pass.

The exit code is 1 if one of these tests fails, if a mutant survives, if a mutant's test does not end within the time
limit, or if the text to replace does not occur exactly once in the source.

| to                                       | look into                 |
|------------------------------------------|---------------------------|
| add a mutation of src/weft/ROOM          | mutations/ROOM.py         |
| add a mutation of src/weft/fsdp/runtime  | mutations/fsdp_runtime.py |
| name a test in several of these files    | mutations/tests.py        |
| see what `where`, `old` and `new` may be | mutation.py               |
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutation import Mutation, Source
from trials import Outcome, import_what_weft_does, run_in_turn

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
TIMEOUT_S = 300
"""The time limit of one test, in seconds, on a machine that also runs other programs."""
BASELINE_TIMEOUT_S = 900


def mutations() -> list[Mutation]:
    """Return all mutations in the folder `mutations`, in the order of its files."""
    files = sorted(file.stem for file in (ROOT / "scripts" / "mutations").glob("*.py"))
    modules = [importlib.import_module(f"mutations.{name}") for name in files]
    return [each for module in modules for each in getattr(module, "MUTATIONS", ())]


def mutated(mutation: Mutation, source: Source, pristine: Path, folder: Path) -> Path:
    """Return a mutated copy of `pristine` in `folder`. Unchanged files are hard links to those of `pristine`."""
    copy = folder / mutation.name.replace(" ", "-")
    shutil.copytree(pristine, copy, copy_function=os.link)
    changed, text = source.mutated(mutation)
    file = copy / "weft" / changed.relative_to(source.package)
    file.unlink()
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
    return copy


def said_of(outcome: Outcome) -> str:
    """Return the verdict on a mutant whose test had this outcome."""
    known = {0: "SURVIVED", 1: "killed", None: f"NO ANSWER in {TIMEOUT_S} s"}
    return known.get(outcome.status, f"NO TEST (exit {outcome.status})")


def try_out(
    mutations: Sequence[Mutation], source: Source, folder: Path, jobs: int, after_tests: bool = False
) -> list[str]:
    """Print the verdict on each mutant. Return reports of the mutants that were not killed."""
    pristine = folder / "as it is"
    shutil.copytree(SOURCE, pristine)
    begin = time.monotonic()
    tests = list(dict.fromkeys(each.test for each in mutations))
    if after_tests:
        tests = list({test.partition("::")[0]: test for test in reversed(tests)}.values())
    shares = [(lambda: pristine, tests[first::jobs]) for first in range(min(jobs, len(tests)))]
    for plain in run_in_turn(shares, ROOT, timeout=BASELINE_TIMEOUT_S, jobs=jobs):
        if plain.status != 0:
            return [f"{plain.output}\nwithout any mutation the named tests end with {plain.status}: they must pass"]
    print(f"{len(tests)} tests pass without mutation ({time.monotonic() - begin:.0f} s)\n")
    print("| mutation | where | test | verdict | seconds |\n|---|---|---|---|---|", flush=True)
    trials = [(lambda each=each: mutated(each, source, pristine, folder), [each.test]) for each in mutations]
    reports = []
    for mutation, outcome in zip(mutations, run_in_turn(trials, ROOT, timeout=TIMEOUT_S, jobs=jobs)):
        said, (file, _, test) = said_of(outcome), mutation.test.partition("::")
        print(f"| {mutation.name} | {mutation.where} | {file} {test} | {said} | {outcome.seconds:.0f} |", flush=True)
        shutil.rmtree(folder / mutation.name.replace(" ", "-"))
        if said != "killed":
            reports.append(f"--- {mutation.name}: {said}\n{outcome.output[-3000:]}")
    print(f"\n{len(mutations) - len(reports)} of {len(mutations)} mutants killed in {time.monotonic() - begin:.0f} s")
    return reports


def main() -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description="Mutants of the source that a named test must kill.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the mutations to try; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="mutants to try at a time (default: 2)")
    parser.add_argument("--after-tests", action="store_true", help="all tests have passed: run one of each file again")
    parser.add_argument("--list", action="store_true", help="print the names, and what does not fit the source")
    arguments = parser.parse_args()
    everything, source = mutations(), Source(SOURCE / "weft")
    if arguments.list:
        problems = source.misfits(everything)
        print("\n".join([*(each.name for each in everything), *problems]))
        return 1 if problems else 0
    unknown = set(arguments.names) - {each.name for each in everything}
    if unknown:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}: see --list")
    chosen = [each for each in everything if not arguments.names or each.name in arguments.names]
    if problems := source.misfits(chosen):
        print("\n".join(problems))
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    import_what_weft_does(ROOT, [each.test for each in chosen])
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
        reports = try_out(chosen, source, Path(folder), arguments.jobs, arguments.after_tests)
    print("\n\n".join(["", *reports]) if reports else "", end="")
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
