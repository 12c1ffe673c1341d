"""The unit file that is shipped fits what the gateway does."""

import configparser
import re
import shutil
import subprocess
import sys

import pytest

from gateway.config.schema import Drain
from tests.support.processes import BIN, ROOT

PATH = ROOT / "deploy/systemd/rankgate.service"


@pytest.fixture(scope="module")
def service():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(PATH.read_text())
    return unit["Service"]


def test_it_is_told_when_the_gateway_is_up_reloads_and_hangs(service):
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(service["WatchdogSec"]) > 1
    assert re.fullmatch(r"/\S+/rankgate serve -c /\S+\.yaml", service["ExecStart"])


def test_it_lets_a_drain_end_and_starts_no_wrong_configuration_again(service):
    drain = Drain()
    assert int(service["TimeoutStopSec"]) >= drain.delay_s + drain.grace_s + 10
    assert service["KillMode"] == "mixed", "one SIGTERM, and to the gateway alone: a second one would end the drain"
    assert service["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_it(tmp_path):
    text = PATH.read_text().replace("/opt/rankgate/bin/rankgate", str(BIN / "rankgate"))
    text = text.replace("User=rankgate", "User=root")
    path = tmp_path / "rankgate.service"
    path.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=30, check=False)
    ours = [line for line in done.stderr.splitlines() if "rankgate.service" in line]
    assert ours == [], sys.platform
