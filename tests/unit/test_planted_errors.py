"""Faults planted in the measuring code, one at a time, by `scripts/dev/plant_faults.py`: a test
sees each of them."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import DEV, HANG, ROOT
from faults.acceptance import REGRESSIONS

SCRIPT = DEV / "plant_faults.py"
CONTROL = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from faults.fault import Fault, Property
import plant_faults
from plant_faults import plant
plant_faults.IMPORTED = "hypothesis", "numpy", "torch.distributed"  # what this test needs
test = "test_measurement.py::test_the_bandwidth_is_the_larger_of_those_before_and_after"
file, text = "bench/runner.py", "bandwidth = max(self.bandwidths"
faults = [("harmless", text, text + " "), ("lost", "bandwidth = largest(self.bandwidths", ""),
          ("wrong", text, "bandwidth = min(self.bandwidths"),
          ("syntax", text, "bandwidth = max((self.bandwidths")]
faults = tuple(Fault(name, file, *texts) for name, *texts in faults)
sys.exit(plant([Property("", test, faults)]))
"""


@pytest.fixture
def script() -> ModuleType:
    import plant_faults

    return plant_faults


def test_every_fault_has_its_place(script: ModuleType) -> None:
    faults = [fault for prop in script.PROPERTIES for fault in prop.faults]
    assert [fault for fault in faults if script.occurrences(fault) != 1] == []
    assert len({fault.name for fault in faults}) == len(faults) > 100
    regressions = [regression.fault for regression in REGRESSIONS]
    assert [fault for fault in regressions if script.occurrences(fault) != 1] == []


def test_every_property_is_on_the_page_with_a_test_that_is_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page that `make docs` builds."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import properties_page

    lines = properties_page.table().splitlines()
    shown = list(zip(lines[5::2], lines[6::2], strict=True))
    assert shown == [(f"   * - {p.name}", f"     - ``{p.test}``") for p in script.PROPERTIES]
    assert len({prop.name for prop in script.PROPERTIES}) == len(shown) > 100
    for prop in script.PROPERTIES:
        file, _, name = prop.test.partition("::")
        text = Path(script.place_of(prop.test).partition("::")[0]).read_text()
        assert f"def {name.partition('[')[0]}(" in text, f"{file} has no {name}"


def plant(*command: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, *command)
    return subprocess.run(words, capture_output=True, text=True, timeout=3 * HANG)


@pytest.mark.wide
@pytest.mark.timeout(3 * HANG + 60)
def test_a_fault_of_every_property_is_seen() -> None:
    """All faults would take longer than CI has: `python scripts/dev/plant_faults.py`."""
    done = plant(str(SCRIPT), "--one")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.wide
def test_a_fault_that_no_test_sees_is_named() -> None:
    """And one whose text is not there any more, and one that leaves no code to test."""
    done = plant("-c", CONTROL)
    file = "bench/runner.py"
    lines = [line for line in done.stdout.splitlines() if f" {file} " in line]
    verdicts = [line.split("test_")[0].split() for line in lines]
    assert verdicts == [
        ["MISPLACED", file, "lost"],
        ["NOT", "SEEN", file, "harmless"],
        ["seen", file, "wrong"],
        ["NOT", "RUN", file, "syntax"],
    ], done.stdout + done.stderr
    assert "its text occurs 0 times" in lines[0] and done.returncode == 1
