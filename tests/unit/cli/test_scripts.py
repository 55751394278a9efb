"""``lancet`` finds the tool of a sub-command. tools/check_wheel.sh runs all of them, installed."""

import sys
from pathlib import Path

import pytest

from megatron_lancet.cli import scripts
from megatron_lancet.cli.commands import COMMANDS, help_text

TOOL = "import sys\nif __name__ == '__main__':\n    print('made', sys.argv)\n"
TOOLS = Path(__file__).parents[3] / "tools"


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lancet", *words])
    scripts.main()


@pytest.fixture(params=["installed", "in a checkout"])
def _tools(request, tmp_path, monkeypatch):
    """Tools as an installation or a checkout has them."""
    folder = tmp_path / "some_tools"
    (folder / "plans").mkdir(parents=True)
    for name in ("plans/make_plan", "check"):
        (folder / f"{name}.py").write_text(TOOL)
    if request.param == "installed":
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(scripts, "_PACKAGE", "some_tools")
    else:
        monkeypatch.setattr(scripts, "_PACKAGE", "megatron_lancet.not_installed")
        monkeypatch.setattr(scripts, "_CHECKOUT", folder)


@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["plan", "make", "profile.json"], ["lancet plan make", "profile.json"]),
        (["check", "--help"], ["lancet check", "--help"]),
        (["check", "plan", "make"], ["lancet check", "plan", "make"]),
    ],
)
def test_lancet_runs_the_tool_of_a_command(monkeypatch, capsys, words, seen):
    run(monkeypatch, *words)
    assert capsys.readouterr().out == f"made {seen}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_lancet_lists_its_commands_on_one_screen(monkeypatch, capsys, words):
    run(monkeypatch, *words)
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert len(shown.splitlines()) <= 40
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("words", [["plan"], ["plan", "--help"]])
def test_lancet_lists_the_commands_of_a_group(monkeypatch, capsys, words):
    run(monkeypatch, *words)
    shown = capsys.readouterr().out
    assert shown == help_text("plan") + "\n"
    assert "plan make" in shown
    assert "trace show" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["chek"], "there is no command 'chek'; expected dry-run, check, estimate, "),
        (["chek"], "Did you mean lancet check? lancet --help lists all."),
        (["plan", "mkae"], "there is no command 'plan mkae'; expected plan profile, plan make, "),
        (["plan", "mkae"], "Did you mean lancet plan make?"),
        (["train.sh"], "there is no command 'train.sh'; "),
    ],
)
def test_lancet_refuses_an_unknown_command(monkeypatch, capsys, words, expected):
    with pytest.raises(SystemExit, match=r"^2$"):
        run(monkeypatch, *words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line


def test_each_tool_has_a_command():
    assert sorted(command.tool for command in COMMANDS.values()) == sorted(
        str(path.relative_to(TOOLS).with_suffix("")) for path in TOOLS.rglob("*.py")
    )
