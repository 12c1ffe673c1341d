"""What is generated from the schema is current and complete; every shipped file is valid."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import inspect

from gateway.config.convert import unwrap
from gateway.config.effective import remarks
from gateway.config.loader import load_config, load_fragment
from gateway.config.schema import Config
from gateway.core.presets import PRESETS
from tools import generate

ROOT = Path(__file__).resolve().parents[2]
FULL = sorted((ROOT / "configs").glob("*.yaml"))
FRAGMENTS = sorted((ROOT / "configs/policies").glob("*.yaml"))


@pytest.mark.parametrize("path", generate.outputs(), ids=lambda path: path.name)
def test_generated_file_is_current(path):
    assert path.read_text(encoding="utf-8") == generate.outputs()[path], "run `make docs`"


def test_check_mode_reports_a_stale_file(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "schema.json"
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "outputs", lambda: {stale: "new"})
    assert generate.main(["--check"]) == 1
    assert not stale.exists()
    assert generate.main([]) == 0
    assert stale.read_text() == "new"
    assert generate.main(["--check"]) == 0
    assert generate.main(["--chek"]) == 2
    assert capsys.readouterr().out == "schema.json: stale; run make docs\nschema.json: written\n"


def fields(kind, prefix=""):
    for field in kind.fields:
        yield f"{prefix}{field.name}", field
        inner = unwrap(field.type)[0]
        path = f"{prefix}{field.name}"
        if isinstance(inner, inspect.VarTupleType):
            path, inner = f"{path}[]", unwrap(inner.item_type)[0]
        elif isinstance(inner, inspect.DictType):
            path, inner = f"{path}.<name>", unwrap(inner.value_type)[0]
        if isinstance(inner, inspect.StructType):
            yield from fields(inner, f"{path}.")


ALL_FIELDS = dict(fields(inspect.type_info(Config)))


@pytest.mark.parametrize("name", ALL_FIELDS)
def test_every_key_is_described_and_in_the_reference(name):
    assert generate.describe(ALL_FIELDS[name])
    section, _, key = name.rpartition(".")
    reference = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    _, _, rest = reference.partition(f"\n### {f'`{section}`' if section else 'Top level'}\n")
    assert f"| `{key}` |" in rest.partition("\n### ")[0]


def test_names_in_a_mapping_are_described_like_keys():
    assert "admission.tenants.named.<name>.weight" in ALL_FIELDS
    definitions = json.loads((ROOT / "configs/gateway.schema.json").read_text())["$defs"]
    named = definitions["Tenants"]["properties"]["named"]
    assert named["additionalProperties"] == {"$ref": "#/$defs/Tenant"}
    assert named["propertyNames"]["pattern"]


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.name)
def test_shipped_configuration_is_valid(path):
    load_config(path)
    assert path.read_text().startswith("# yaml-language-server: $schema=gateway.schema.json\n")


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_the_modes_have_an_example_that_gives_no_cause_for_remarks(mode):
    config = load_config(ROOT / f"configs/{mode}.yaml")
    assert config.scheduling.mode == mode
    assert remarks(config) == []


def test_no_other_file_queues():
    others = [path for path in FULL if path.stem not in ("queue", "batch")]
    assert {load_config(path).scheduling.mode for path in others} == {"direct"}


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_shipped_policy_is_valid_and_does_what_its_name_says(path):
    config = load_fragment(path)
    assert path.read_text().startswith("# yaml-language-server: $schema=../fragment.schema.json\n")
    assert (config.policy.preset or "custom_cost") == path.stem


def test_every_preset_has_a_file():
    assert {path.stem for path in FRAGMENTS} == {*PRESETS, "custom_cost"}


@pytest.mark.parametrize("path", [*FULL, *FRAGMENTS], ids=lambda path: path.name)
def test_check_config_as_a_process(path):
    fragment = ["--fragment"] if path in FRAGMENTS else []
    result = subprocess.run(
        [sys.executable, "-m", "gateway", "check-config", *fragment, path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{path}: OK: ")


def test_schema_refuses_what_the_loader_refuses():
    """The parts of the JSON schema that editors rely on."""
    schema = json.loads((ROOT / "configs/gateway.schema.json").read_text())
    definitions = schema["$defs"]
    assert schema["$ref"] == "#/$defs/Config"
    assert all(definition["additionalProperties"] is False for definition in definitions.values())
    assert definitions["Config"]["required"] == ["version", "model", "groups"]
    assert definitions["Group"]["properties"]["protocol"]["enum"] == ["tokenspeed", "vllm"]
    fragment = json.loads((ROOT / "configs/fragment.schema.json").read_text())
    assert fragment["$defs"]["Config"]["required"] == []
