"""Installed scripts run the tool that they are named after. tools/check_wheel.sh runs all of them, installed."""

import sys

import pytest

from megatron_lancet.cli import scripts

TOOL = "import sys\nif __name__ == '__main__':\n    print('made', sys.argv[1:])\n"


@pytest.fixture
def _installed(tmp_path, monkeypatch):
    """Tools as an installation has them."""
    folder = tmp_path / "some_tools"
    folder.mkdir()
    (folder / "make_plan.py").write_text(TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(scripts, "_PACKAGE", "some_tools")


@pytest.mark.usefixtures("_installed")
def test_installed_script_runs_its_tool(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lancet-make-plan", "profile.json"])
    scripts.main()
    assert capsys.readouterr().out == "made ['profile.json']\n"


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", ["lancet-no-such-tool", "renamed"])
def test_script_of_another_name_is_refused(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}"])
    with pytest.raises(SystemExit) as ended:
        scripts.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: there is no tool {name};")


@pytest.mark.parametrize("has_tool", [True, False])
def test_script_of_a_checkout_runs_the_file_in_its_folder(monkeypatch, capsys, tmp_path, has_tool):
    monkeypatch.setattr(scripts, "_PACKAGE", "megatron_lancet.not_installed")
    monkeypatch.setattr(scripts, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lancet-make-plan", "profile.json"])
    if has_tool:
        (tmp_path / "make_plan.py").write_text("import sys\nprint('made', sys.argv[1:])\n")
        scripts.main()
        assert capsys.readouterr().out == "made ['profile.json']\n"
        return
    with pytest.raises(SystemExit, match=r"^2$"):
        scripts.main()
    assert "there is no tool" in capsys.readouterr().err
