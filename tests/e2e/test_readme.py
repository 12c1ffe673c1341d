"""The commands that the documentation shows: those of the README run, all others at least parse."""

import itertools
import json
import re
import shlex
import shutil
import signal
import sys

import click
import grpc_health.v1.health_pb2  # noqa: F401 - its descriptors are looked up below
import pytest
import smg_grpc_proto.generated.tokenspeed_scheduler_pb2
import smg_grpc_proto.generated.vllm_engine_pb2  # noqa: F401
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory

import engine_stub.cli
import gateway.cli
import gateway.v1.admin_pb2
from tests.support.deployment import Deployment
from tests.support.grpcurl import json_documents
from tests.support.processes import ROOT, run, wait_until

pytestmark = pytest.mark.e2e

PROGRAMS = ("make", "rankgate", "engine-stub", "grpcurl")
ENGINES = ("vllm",)
"""Of others, and not run here."""
SHELL = {"&", "&&", ";", "|", ">", ">>", "<"}
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMENTED = sorted((ROOT / "configs").rglob("*.yaml"))
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs/api.md").read_text()


def blocks(text, *languages):
    """The fenced blocks of the languages; "" are those without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for language, block in fenced if language in languages]


def lines_in(text):
    """Every line that may be a command: of blocks, of prose in backticks, of comments in configurations."""
    for block in blocks(text, "", "sh", "bash", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            # Several on one line have their prompts to tell them apart.
            yield from re.split(r"\s{2,}\$ ", line.removeprefix("$ "))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(rf"`((?:\.venv/bin/)?(?:{'|'.join(PROGRAMS)}) [^`]+)`", prose)
    yield from re.findall(rf"^#   ((?:{'|'.join(PROGRAMS)}) .+)$", text, re.MULTILINE)


def commands_in(text):
    """Every command of our own programs as its words, up to what is the shell's."""
    for line in lines_in(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(itertools.takewhile(lambda word: word not in SHELL, lexer))
        except ValueError:
            continue  # a drawing, a piece of JSON
        if words and words[0].removeprefix(".venv/bin/") in {*PROGRAMS, *ENGINES}:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def shown(paths):
    """A test case for each command of our own programs."""
    for path in paths:
        for words in commands_in(path.read_text()):
            if words[0] in PROGRAMS:
                yield pytest.param(words, id=f"{path.relative_to(ROOT)}: {' '.join(words)[:60]}")


def parse(group, arguments, tmp_path):
    """Parse a command line with click, to the last option, without running it. A bare name only has to exist."""
    name, *rest = arguments
    if name.startswith("-"):
        assert name in ("-h", "--help", "--version")
        return
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"there is no command {name}"
    # Files need not be there, and words in capitals stand for anything.
    existing = tmp_path / "file.yaml"
    existing.write_text("{}")
    rest = [str(existing) if word.endswith((".yaml", ".json")) or word == "FILE" else word for word in rest]
    rest = ["1" if re.fullmatch(r"[A-Z]+", word) else word for word in rest]
    if rest:
        command.make_context(name, rest)


@pytest.mark.parametrize("words", list(shown([*PAGES, *COMMENTED])))
def test_each_command_that_is_shown_exists_and_parses(words, tmp_path):
    program, *arguments = words
    if program == "make":
        done = run(shutil.which("make"), "--dry-run", *arguments)
        assert done.returncode == 0, done.stderr
        for name in (word.partition("=")[0] for word in arguments if "=" in word):
            assert f"$({name})" in (ROOT / "Makefile").read_text()
    elif program == "grpcurl":
        *_, symbol = arguments
        assert {"-plaintext", "-cacert"} & {*arguments}
        if symbol not in ("list", "describe"):
            method = descriptor_pool.Default().FindMethodByName(symbol.replace("/", "."))
            data = arguments[arguments.index("-d") + 1] if "-d" in arguments else "{}"
            json_format.Parse(data, message_factory.GetMessageClass(method.input_type)())
    elif arguments:
        parse(gateway.cli.cli if program == "rankgate" else engine_stub.cli.main, arguments, tmp_path)


def test_the_parser_finds_what_is_wrong(tmp_path):
    for arguments in (["serve", "--port", "1"], ["explain", "--prompt-tokens", "many"]):
        with pytest.raises(click.UsageError):
            parse(gateway.cli.cli, arguments, tmp_path)
    with pytest.raises(AssertionError):
        parse(gateway.cli.cli, ["rank"], tmp_path)
    text = "```yaml\nx: 1\n```\n```\n$ rankgate ranks   $ grpcurl \\\n  x/y & # z\n```\nor `make demo KEEP=1`"
    assert list(commands_in(text)) == [["rankgate", "ranks"], ["grpcurl", "x/y"], ["make", "demo", "KEEP=1"]]


class Story:
    """The README from top to bottom, on free ports: what it says about addresses and files is put in its place."""

    def __init__(self, site):
        (text,) = blocks(README, "yaml")
        self.config = yaml.safe_load(text)
        (group,) = self.config["groups"]
        site.ranks = group["ranks"]
        ports = site.ports
        self._places = {
            "127.0.0.1:50051": ports.grpc,
            "127.0.0.1:50052": ports.admin,
            group["handshake"]: f"tcp://{ports.handshake}",
            "gateway.yaml": str(site.directory / "gateway.yaml"),
            self.config["state_dir"]: str(site.directory / "state"),
        }
        listen = {"grpc": ports.grpc, "admin": ports.admin, "metrics": ports.metrics}
        (site.directory / "gateway.yaml").write_text(f"{self.put(text)}\nlisten: {json.dumps(listen)}\n")

    def put(self, text):
        for old, new in self._places.items():
            text = text.replace(old, new)
        return text

    def command(self, *start):
        """The README's one command that starts so, ready to run."""
        (found,) = [words for words in commands_in(README) if words[: len(start)] == list(start)]
        return [self.put(word) for word in found]

    def answers(self, text):
        """Run every grpcurl line of a page; by the name of the method."""
        calls = [[self.put(word) for word in words] for words in commands_in(text) if words[0] == "grpcurl"]
        answers = {words[-1].rpartition("/")[2]: run(*words) for words in calls}
        assert all(done.returncode == 0 for done in answers.values()), answers
        return answers

    def program(self, text):
        """What the page's Python program prints."""
        (block,) = blocks(text, "python")
        done = run(sys.executable, "-c", self.put(block))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


def test_the_readme_works_from_top_to_bottom():
    with Deployment("vllm") as site:
        story = Story(site)
        checked = run(*story.command("rankgate", "check-config"))
        assert (checked.returncode, checked.stderr) == (0, "")
        site.gateway = site.process("gateway", *story.command("rankgate", "serve"))
        # The engine of the README is a stub's place-holder: the two are told the same.
        engine = story.command("vllm", "serve")
        assert engine[engine.index("--data-parallel-size") + 1] == str(site.ranks)
        assert story.config["groups"][0]["handshake"].endswith(engine[engine.index("--data-parallel-rpc-port") + 1])
        ranks = site.process("ranks", *story.command("engine-stub", "serve"))
        site.wait_ready()
        assert ranks.is_running

        answers = story.answers(README)
        messages = json_documents(answers["Generate"].stdout)
        assert sum(len(message["token_ids"]) for message in messages) == 8
        listed = json_documents(answers["ListRanks"].stdout)[0]["ranks"]
        assert [rank["rank"] for rank in listed] == list(range(site.ranks))
        assert len(json_documents(answers["ListDecisions"].stdout)[0]["decisions"]) == 1

        explained = run(*story.command("rankgate", "explain"))
        assert (explained.returncode, explained.stderr) == (0, "")
        assert "chosen   rank " in explained.stdout
        assert len(re.findall(r"eligible$", explained.stdout, re.MULTILINE)) == site.ranks
        lists = [json.loads(line) for line in story.program(README).splitlines()]
        assert len([token for tokens in lists for token in tokens]) == 8

        # The page on the API, at the same gateway.
        described = story.answers(API)
        assert "x-rankgate-decision-id" in described["Generate"].stdout
        drained = json_documents(described["DrainRank"].stdout)[0]["rank"]["state"]
        undrained = json_documents(described["UndrainRank"].stdout)[0]["rank"]["state"]
        assert (drained, undrained) == ("RANK_STATE_DRAINING", "RANK_STATE_READY")
        assert len(json.loads(story.program(API))) == 8
        # It relies on the default address, which is another gateway's here.
        watch = site.process("watch", *story.command("rankgate", "ranks"), "--address", site.ports.grpc)
        wait_until(lambda: watch.output.count("READY") >= site.ranks or not watch.is_running, "the first list")
        watch.send(signal.SIGINT)
        assert watch.wait() == 0
        assert "Traceback" not in watch.log
        assert site.gateway.stop() == 0
        assert ranks.stop() == 0
