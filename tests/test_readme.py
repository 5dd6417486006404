"""Every command of the README runs; those that judge big cases run on small ones, with the sizes appended."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lsverify.cli import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SMALL = "--prompt-length 9 --group-size 2 --response-length 3,1".split()
# What a command costs at its own size, and what is appended to it here. The last value of an option counts.
APPENDED = {
    "gate": SMALL,
    "export": SMALL,
    "alarms": "--arch llama --runs 1 --workers 1".split(),
    "floors": "--arch llama --dtype float64".split(),
    "faults": "--problems 1 --workers 1 --fault signs_only".split(),
    "ablate": "--arch llama --lengths 9 --group-size 2 --response-length 3,1".split(),
    "nightly": ["--help"],  # minutes; tests/test_cli_nightly.py spends small nights
    "report": ["--help"],  # of a night
    "bench": "--prompt-length 33 --response-length 4 --group-size 2 --layers 2 --width 32 --path exact --path detach".split(),
}
# A pretrained model also in float64, stopped as well as full, is minutes: here it climbs two rungs with one policy.
PRETRAINED = "--policy exact --require execution".split()
EXIT_CODES = {"--reference full": 1}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`(lsverify [^`]*)`", README)
    found = [line for line in lines if line] + inline
    return list(dict.fromkeys(found))


def of_program(program: str) -> list[str]:
    return [command for command in commands() if program_of(command) == program]


def program_of(command: str) -> str:
    """The first word that sets no variable."""
    return next(word for word in command.split() if not re.match(r"[A-Z_]+=", word))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with the README's own candidate in it, where commands run one after the other."""
    path = tmp_path_factory.mktemp("reader")
    (candidate,) = re.findall(r"```python\n(# my_path.py\n.*?)```", README, flags=re.DOTALL)
    (path / "my_path.py").write_text(candidate)
    return path


def test_commands_are_of_known_programs():
    assert {program_of(command) for command in commands()} == {
        "bash",
        "lsverify",
        "pytest",
        "python",
        "source",
    }


@pytest.mark.xdist_group("readme")
@pytest.mark.usefixtures("my_path_anew")
@pytest.mark.parametrize("command", of_program("lsverify"))
def test_lsverify_command_runs(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    arguments = shlex.split(command)[1:]
    expected = next((code for part, code in EXIT_CODES.items() if part in command), 0)
    if arguments[0] == "check":
        take_the_step(monkeypatch)
    if arguments in (["repeat"], ["table"], ["alarms"], ["faults"]):
        arguments.append("--help")  # named in running text, not meant to be typed like this
    elif arguments[0] in APPENDED:
        arguments += APPENDED[arguments[0]]
        arguments += PRETRAINED if "smollm2-135m" in arguments else []
    assert run(arguments) == expected, capsys.readouterr()


def take_the_step(monkeypatch):
    """What the reader does between export and check: the script that the case comes with."""
    (command,) = of_program("python")
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("command", of_program("bash"))
def test_script_is_there_and_parses(command):
    script = ROOT / command.split()[1]
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize("command", of_program("pytest"))
def test_pytest_command_runs(command):
    words = shlex.split(command)
    at = words.index("pytest")
    whole_matrix = "--lsv-arch=all" in words
    chosen = (
        "order_of_siblings and llama and exact" if whole_matrix else "gradient and test_gradient"
    )
    arguments = [*words[at + 1 :], "-q", "-k", chosen, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env=os.environ | dict(word.split("=") for word in words[:at]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_policies_of_the_table_are_policies():
    (section,) = re.findall(r"^## Policies\n(.*?)^B = P", README, flags=re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`.*?`) \|", section, flags=re.MULTILINE)
    policies = [policy for cell in cells for policy in re.findall(r"`([^`]+)`", cell)]
    from lsverify.policies import parse_policy

    values = {"M": "3", "K": "2", "P": "0.5", "N": "3"}
    specs = [re.sub(r"(?<=:)[MKPN]", lambda letter: values[letter[0]], spec) for spec in policies]
    assert len(specs) == 9
    assert all(parse_policy(spec) for spec in specs)
