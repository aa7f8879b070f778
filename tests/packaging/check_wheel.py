"""Checks what was built and what was installed from it; `.ci/run` calls this, pytest does not collect it.

    python -I check_wheel.py contents DIST CHECKOUT    the files in the sdist and in the wheel
    python -I check_wheel.py core                      installed without any extra
    python -I check_wheel.py extras NAME...            installed with these extras

The last two run in an environment that holds the wheel, from a folder outside of the checkout.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

# Public names that need an extra, and the module whose absence says that the extra is not installed.
NEEDS_EXTRA = {"PadMinCallback": "lightning"}
EXTRA_MODULE = {"lightning": "lightning"}


def check(condition: object, message: str) -> None:
    if not condition:
        sys.exit(f"check_wheel: {message}")


def the_only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    check(len(found) == 1, f"expected one {pattern} in {folder}, found {[path.name for path in found]}")
    return found[0]


def sources(folder: Path, suffixes: tuple[str, ...] = ("",)) -> set[str]:
    """Files below a folder of the checkout, relative to it; those that Python itself writes are left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files if path.name.endswith(suffixes)}


def check_contents(dist: Path, checkout: Path) -> None:
    core = sources(checkout / "lightning_padmin", (".py", "py.typed"))
    # lightning_padmin/integrations is a link to integrations/.
    core = {name for name in core if not name.startswith("integrations/")}
    adapters = sources(checkout / "integrations", (".py",))
    check({"__init__.py", "py.typed"} <= core, "the checkout lacks lightning_padmin/__init__.py or py.typed")
    check("__init__.py" in adapters, "the checkout lacks integrations/__init__.py")

    wheel = the_only(dist, "*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
    payload = {name for name in inside if ".dist-info/" not in name}
    expected = {f"lightning_padmin/{name}" for name in core}
    expected |= {f"lightning_padmin/integrations/{name}" for name in adapters}
    check(payload == expected, f"{wheel.name}: missing {expected - payload}, unexpected {payload - expected}")
    licensed = any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    check(licensed, f"{wheel.name} lacks the licence")

    sdist = the_only(dist, "*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"lightning_padmin/{name}" for name in core}
    for folder in ("integrations", "tests", "examples"):
        files = sources(checkout / folder)
        check(files, f"the checkout has no files in {folder}")
        expected |= {f"{folder}/{name}" for name in files}
    expected |= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"}
    check(expected <= members, f"{sdist.name}: missing {expected - members}")
    print(f"{wheel.name}: {len(payload)} files; {sdist.name}: {len(expected)} files expected, all there")


def check_installed(extras: set[str]) -> None:
    for extra, module in EXTRA_MODULE.items():
        present = importlib.util.find_spec(module) is not None
        check(present == (extra in extras), f"{module}: installed: {present}, extras: {sorted(extras)}")

    package = importlib.import_module("lightning_padmin")
    site_packages = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    home = Path(str(package.__file__)).resolve()
    check(home.parent.parent in site_packages, f"lightning_padmin comes from {home}, not from site-packages")
    stray = importlib.util.find_spec("integrations")
    check(stray is None, f"a top-level module 'integrations' can be imported: {stray}")

    check(len(package.__all__) == len(set(package.__all__)), "a name stands twice in __all__")
    check(set(NEEDS_EXTRA) <= set(package.__all__), f"__all__ lacks some of {set(NEEDS_EXTRA)}")
    for name in package.__all__:
        extra = NEEDS_EXTRA.get(name)
        if extra is None or extra in extras:
            getattr(package, name)
            continue
        try:
            getattr(package, name)
        except ImportError as error:
            command = f'pip install "lightning-padmin[{extra}]"'
            check(command in str(error), f"the error of {name} does not say {command}: {error}")
        else:
            check(False, f"{name} imports without the extra {extra}")
    print(f"{len(package.__all__)} public names checked with extras {sorted(extras)} in {home.parent}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["contents", dist, checkout]:
            check_contents(Path(dist), Path(checkout))
        case ["core"]:
            check_installed(set())
        case ["extras", *names] if names:
            check_installed(set(names))
        case _:
            sys.exit(__doc__)
