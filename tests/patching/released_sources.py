"""Sources of the releases that patches are checked against: installed, or downloaded once into the user's cache."""

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from verl_ext_sharding import versions
from verl_ext_sharding.patching import PatchSpec

_DOWNLOAD_LIMIT_S = 300


class SourceUnavailableError(Exception):
    """The source of a release can't be had here; the message says why."""


@dataclass(kw_only=True, frozen=True)
class Source:
    """Where the files of one release are.

    Args:
        distribution: Name on the package index.
        release: Its version.
        wheel: The downloaded wheel, or None for what is installed. It is also the `root` that `module_source` takes.
    """

    distribution: str
    release: str
    wheel: Path | None

    def read(self, path: str) -> bytes:
        """Content of a file, by its path in the wheel, such as "verl/trainer/main_ppo.py"."""
        if self.wheel is not None:
            with zipfile.ZipFile(self.wheel) as archive:
                return archive.read(path)
        top, _, rest = path.partition("/")
        found = importlib.util.find_spec(top)
        return Path(found.submodule_search_locations[0], rest).read_bytes()


def supported_releases(spec: PatchSpec) -> tuple[str, ...]:
    """Releases that a patch has to fit, oldest first: the tested ones of verl, of anything else what is installed."""
    installed = versions.installed(spec.distribution)
    releases = versions.VERL_TESTED if spec.distribution == "verl" else (installed,) if installed else ()
    return tuple(release for release in releases if versions.in_range(release, spec.range))


@functools.cache
def find(distribution: str, release: str) -> Source | str:
    """The source of a release, or why there is none here. Asks the package index once for each release and session."""
    if versions.installed(distribution) == release:
        return Source(distribution=distribution, release=release, wheel=None)
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{distribution.replace('-', '_')}-{release}-"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not list(folder.glob(f"{stem}*.whl")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            command += ["--dest", scratch, f"{distribution}=={release}"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"{distribution} {release} did not download in {_DOWNLOAD_LIMIT_S} s"
            if done.returncode != 0:
                return f"{distribution} {release} can't be downloaded: {done.stderr.strip().rpartition(chr(10))[2]}"
            for wheel in Path(scratch).glob("*.whl"):
                os.replace(wheel, folder / wheel.name)
    wheels = sorted(folder.glob(f"{stem}*.whl"))
    if not wheels:
        return f"{distribution} {release} has no wheel called {stem}*"
    return Source(distribution=distribution, release=release, wheel=wheels[0])


def get(distribution: str, release: str) -> Source:
    """The source of a release.

    Raises:
        SourceUnavailableError: If it is neither installed nor to be downloaded.
    """
    found = find(distribution, release)
    if isinstance(found, str):
        raise SourceUnavailableError(found)
    return found


def cache_folder() -> Path:
    """Where downloaded wheels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "verl-ext-sharding" / "sources"
