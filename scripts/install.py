"""Installs packages beside this interpreter, as `pip install` does with the same arguments and settings, but by uv.

    .venv/bin/python scripts/install.py --requirement requirements.txt

uv needs a tenth of pip's time and reads neither pip's files nor PIP_* variables, so their settings become options and
variables of uv. Pip installs if uv is not there or fails, or if it has nothing for one of the settings.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
UV = [sys.executable, "-m", "uv"]

# Names of pip's settings, and what uv calls them: options with several values, flags, and variables. Other users of the
# machine can read options, and an index may have a password.
MANY = {"constraint": "--constraint", "trusted-host": "--allow-insecure-host"}
MANY |= {"no-binary": "--no-binary", "only-binary": "--only-binary"}
FLAGS = {"no-index": "--no-index", "pre": "--prerelease=allow", "no-cache-dir": "--no-cache"}
VARIABLES = {"cert": ["SSL_CERT_FILE"], "client-cert": ["SSL_CLIENT_CERT"], "retries": ["UV_HTTP_RETRIES"]}
VARIABLES |= {"timeout": ["UV_HTTP_TIMEOUT"], "default-timeout": ["UV_HTTP_TIMEOUT"]}
VARIABLES |= {
    "index-url": ["UV_DEFAULT_INDEX"],
    "extra-index-url": ["UV_EXTRA_INDEX_URL"],
    "find-links": ["UV_FIND_LINKS"],
}
VARIABLES |= {"proxy": ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"]}
SEPARATORS = {"find-links": ","}  # of the values of a variable, where it is not a space
# These change what pip prints, asks and keeps, and not what it installs.
OF_PIP_ALONE = {
    "break-system-packages",
    "cache-dir",
    "config-file",
    "disable-pip-version-check",
    "log",
    "no-color",
    "no-input",
    "no-warn-conflicts",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}


class UvCannot(Exception):
    """The reason why pip has to install."""


def pip_settings() -> dict[str, str]:
    """Return pip's settings for installing: PIP_* variables before [install] of its files, and that before [global]."""
    # -vvv, because a setting of `quiet` would leave nothing of the list.
    listed = subprocess.run([*PIP, "config", "list", "-vvv"], capture_output=True, text=True, check=True).stdout
    found = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, has_value, value = line.partition("=")
            if has_value and name.startswith(section):
                found[name.removeprefix(section)] = ast.literal_eval(value)
    return {name: value for name, value in found.items() if value}


def uv_settings(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options and the variables that give uv these settings of pip. Raises UvCannot."""
    # Of several indexes, pip takes the best version, and uv by itself the first index that has the package.
    options, variables = ["--index-strategy", "unsafe-best-match"], dict[str, str]()
    for name, value in settings.items():
        if name in MANY:
            options += [word for each in value.split() for word in (MANY[name], each)]
        elif name in FLAGS:
            options += [FLAGS[name]] * (value.lower() in ("1", "true", "yes", "on", "t", "y"))
        elif name in VARIABLES:
            variables |= dict.fromkeys(VARIABLES[name], SEPARATORS.get(name, " ").join(value.split()))
        elif name not in OF_PIP_ALONE:
            raise UvCannot(f"uv has nothing for pip's setting {name}")  # its value may be a secret
    return options, variables


def link_mode() -> str:
    """Return how files get from uv's cache into the environment: hard links, or copies onto another file system."""
    cache = Path(subprocess.run([*UV, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip())
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return "hardlink" if existing.stat().st_dev == Path(sys.prefix).stat().st_dev else "copy"


def install_by_uv(arguments: list[str]) -> None:
    """Install by uv. Raises UvCannot."""
    options, variables = uv_settings(pip_settings())
    environment = {"UV_LINK_MODE": link_mode()} | os.environ | variables
    command = [*UV, "pip", "install", "--python", sys.executable, *options, *arguments]
    if code := subprocess.run(command, env=environment, check=False).returncode:
        raise UvCannot(f"uv failed with exit code {code}")


def main(arguments: list[str]) -> int:
    """Install, and return the exit code."""
    if importlib.util.find_spec("uv"):
        try:
            install_by_uv(arguments)
            return 0
        except (UvCannot, subprocess.CalledProcessError, OSError, ValueError) as error:
            print(f"setup: {error}; pip goes on, which takes minutes", file=sys.stderr)
    return subprocess.run([*PIP, "install", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
