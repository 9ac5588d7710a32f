"""Runs the GPU tests, or compute-sanitizer over a reduced pager test and small random layers, and writes what came of it.

    python benchmarks/gpu/checks.py tests --out FOLDER        gpu_tests.json
    python benchmarks/gpu/checks.py sanitize --out FOLDER     gpu_sanitize.json
"""

import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import record
from report import Report, arguments

FAULTS = ("cannot_be_read", "short_reads", "hangs", "server_that_stopped", "with_faults")
"""Of the names of the tests that break reads."""
TOOLS = ("memcheck", "racecheck")
API_ERRORS = {"memcheck": ("--report-api-errors", "no")}
"""The bindings ask the driver for functions that it may be too old for, and go on without."""
CHECKED = {
    "": ("the reduced pager test", [str(Path(__file__).parent / "reduced.py")]),
    ".kernels": (
        "random layers of every row format",
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(record.ROOT / "tests" / "gpu" / "test_kernels_bounds.py"), "--reduced", "-k", "random_layers"],
    ),
}
"""End of a claim's id -> what compute-sanitizer looks at, and how Python runs it."""


def outcomes(junit: str) -> dict[str, str]:
    """Test -> passed, failed or skipped, from a JUnit file's text."""
    found = {}
    for case in ET.fromstring(junit).iter("testcase"):
        states = {child.tag for child in case}
        found[f"{case.get('classname')}::{case.get('name')}"] = (
            "failed" if states & {"failure", "error"} else "skipped" if "skipped" in states else "passed"
        )
    return found


def hazards(log: str) -> int | None:
    """Errors that compute-sanitizer counted; None if its summary is missing: then it did not run to its end."""
    found = re.search(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", log)
    return int(found[1] or found[2]) if found else None


def test_claims(found: dict[str, str]) -> list[record.Claim]:
    ran = {name: state for name, state in found.items() if state != "skipped"}
    faults = {name: state for name, state in ran.items() if any(f in name for f in FAULTS)}
    count = lambda states: sum(state == "passed" for state in states.values())
    return [
        record.Claim("G7.tests", "GPU tests that pass", count(ran), f"of {len(ran)}", max(len(ran), 1), "=="),
        record.Claim("G7.faults", "those that break reads (EIO, short, late, hanging, no I/O thread): right values or a counted failure", count(faults), f"of {len(faults)}",
                     max(len(faults), 1), "=="),
    ]  # fmt: skip


def run_tests(report: Report, folder: Path) -> None:
    junit = folder / "gpu_tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", str(record.ROOT / "tests" / "gpu"), "-p", "no:cacheprovider", f"--junitxml={junit}"]
    junit.unlink(missing_ok=True)
    try:
        with report.timed("tests"):
            subprocess.run(command, cwd=record.ROOT, timeout=report.left, check=False)
    except subprocess.TimeoutExpired:
        report.say(f"tests: stopped, {report.elapsed:.0f} s are over")
    found = outcomes(junit.read_text()) if junit.exists() else {}
    report.claims, report.samples = test_claims(found), {"tests": found}


def run_sanitizer(report: Report, folder: Path) -> None:
    for (part, (what, program)), tool in itertools.product(CHECKED.items(), TOOLS):
        name = f"{tool}{part}"
        if not report.fits(name, 30):
            continue
        log = folder / f"sanitize-{name}.log"
        command = ["compute-sanitizer", "--tool", tool, *API_ERRORS.get(tool, ()), "--log-file", str(log), sys.executable, *program]
        with report.timed(name):
            try:
                done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, timeout=report.left, check=False)
                output, code = done.stdout + done.stderr, done.returncode
            except subprocess.TimeoutExpired as e:
                output, code = f"stopped after {e.timeout:.0f} s", -1
        errors = hazards(log.read_text()) if log.exists() else None
        report.samples[name] = {"exit": code, "output": output[-4000:], "summary": log.read_text()[-2000:] if log.exists() else ""}
        report.say(name, errors, f"exit {code}", output[-500:])
        failed = errors is None or code != 0
        report.claims.append(record.Claim(f"G7.{name}", f"errors that compute-sanitizer {tool} finds in {what}", -1 if failed and not errors else errors, "", 0, "=="))
        report.write()


def main() -> None:
    parser = arguments(__doc__, 280)
    parser.add_argument("what", choices=("tests", "sanitize"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out / f"gpu_{options.what}.json", "small layers of every row format", options.seconds, options.commit)
    {"tests": run_tests, "sanitize": run_sanitizer}[options.what](report, options.out)
    report.finish()
    sys.exit(not all(c.held for c in report.claims))


if __name__ == "__main__":
    main()
