"""What SECURITY.md promises of the source: nothing of a user's files is evaluated or unpickled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "lightning_padmin").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "marshal.loads",
    "joblib.load",
}


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def found(source: str) -> list[str]:
    """Calls that would run or unpickle what they are given."""
    bad = []
    for name, node in calls(source):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in FORBIDDEN or (name.endswith(".load") and options.get("allow_pickle", "False") != "False"):
            bad.append(name)
        if options.get("trust_remote_code", "False") != "False" or options.get("shell", "False") != "False":
            bad.append(name)
    return bad


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_evaluated_or_unpickled(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8")) == []


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 50
    assert any("yaml.safe_load" in path.read_text(encoding="utf-8") for path in FILES)


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "torch.load(path)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_negative_control(source: str) -> None:
    assert found(source)
