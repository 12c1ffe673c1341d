"""`rankgate check-config`."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gateway.cli import cli
from tests.support.config_cases import BASE


def run(*arguments, **options):
    return CliRunner().invoke(cli, ["check-config", *map(str, arguments)], **options)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "g.yaml"
    path.write_text(BASE)
    return path


def test_good_file(path):
    result = run(path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{path}: OK: model m, 2 vllm ranks in 1 group, policy lmetric\n"


def test_summary_of_one_rank_and_a_formula(path):
    path.write_text(BASE.replace("ranks: 2", "ranks: 1") + "policy: {cost: in_flight}\n")
    assert run(path).stdout == f"{path}: OK: model m, 1 vllm rank in 1 group, cost in_flight\n"


def test_summary_of_a_mode_that_is_not_the_default(path):
    path.write_text(BASE + "scheduling: {mode: batch}\n")
    result = run(path)
    assert result.stdout == f"{path}: OK: model m, 2 vllm ranks in 1 group, policy lmetric, mode batch\n"
    assert result.stderr == (
        f"{path}: note: scheduling.mode batch without predictor.prefill_ms is not calibrated:"
        " order and gate count prompt tokens instead of time\n"
    )


def test_bad_file_as_a_process(path):
    path.write_text(BASE.replace("ranks: 2", "rnks: 2"))
    result = subprocess.run(
        [sys.executable, "-m", "gateway", "check-config", path], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"{path}:7:5: unknown key 'rnks'; did you mean 'ranks'? (at $.groups[0].rnks)\n"


def test_unreadable_file(tmp_path):
    result = run(tmp_path / "absent.yaml")
    assert (result.exit_code, result.stderr) == (2, f"{tmp_path}/absent.yaml: No such file or directory\n")


def test_file_from_the_environment(path):
    assert run(env={"RANKGATE_CONFIG": str(path)}).exit_code == 0


@pytest.mark.parametrize("flag", [[], ["-c"], ["--config"]])
def test_what_the_command_line_names_goes_before_the_environment(path, flag):
    result = run(*flag, path, env={"RANKGATE_CONFIG": "/nowhere"})
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "name FILE, or set RANKGATE_CONFIG"), (["a", "-c", "b"], "name one FILE, with or without -c")],
)
def test_one_file_is_wanted(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"Error: {message}\n" in result.stderr


def test_remarks_go_to_stderr(path):
    path.write_text(BASE + "listen: {admin: 10.0.0.1:1}\n")
    result = run(path)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"{path}: note: listen.admin 10.0.0.1:1 is reachable")


def test_effective_prints_the_whole_configuration(path):
    effective = json.loads(run(path, "--effective").stdout)
    assert effective["groups"][0]["load_semantics"] == "disjoint"
    assert effective["drain"] == {"delay_s": 0.0, "grace_s": 30.0}


def test_fragment(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("policy: {preset: smg}\n")
    assert run(path, "--fragment").stdout == f"{path}: OK: fragment, policy smg\n"
    assert run(path).exit_code == 2
    path.write_text("policy: {preset: smgg}\n")
    result = run(path, "--fragment")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{path}:1:18: unknown value 'smgg'")
