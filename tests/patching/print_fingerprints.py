"""Prints what a SPEC says of its target, for every supported release, ready to be pasted.

python tests/patching/print_fingerprints.py verl.trainer.ppo.v1.trainer_base:PPOTrainer._setup
python tests/patching/print_fingerprints.py hydra.main:main --distribution hydra-core
python tests/patching/print_fingerprints.py verl.protocol:DataProto.chunk --wheel verl-0.9.2-py3-none-any.whl
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import released_sources

from verl_ext_sharding import versions
from verl_ext_sharding.errors import PatchError
from verl_ext_sharding.patching.fingerprint import fingerprint, module_source, signature


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="package.module:Qual.name")
    parser.add_argument("--distribution", default="verl")
    parser.add_argument("--release", action="append", help="instead of the supported ones; may be repeated")
    parser.add_argument("--wheel", type=Path, help="a wheel or an unpacked folder, instead of releases")
    options = parser.parse_args()
    module, _, qualname = options.target.partition(":")
    if not qualname:
        parser.error(f"target is package.module:Qual.name, got {options.target}")
    try:
        roots = find_roots(options.distribution, options.release, options.wheel)
        sources = {name: module_source(module, root) for name, root in roots.items()}
        signatures = {name: signature(text, qualname) for name, text in sources.items()}
        fingerprints = {name: fingerprint(text, qualname) for name, text in sources.items()}
    except (PatchError, released_sources.SourceUnavailableError) as error:
        print(error, file=sys.stderr)
        return 1
    for names in dict.fromkeys(signatures.values()):
        where = [name for name, found in signatures.items() if found == names]
        print(f"signature={quoted(names)},  # {', '.join(where)}")
    print("fingerprints={" + ", ".join(f'"{name}": "{found}"' for name, found in fingerprints.items()) + "},")
    return 0


def quoted(names: tuple[str, ...]) -> str:
    """A tuple of strings as this project's formatter writes it."""
    inner = ", ".join(f'"{name}"' for name in names)
    return f"({inner},)" if len(names) == 1 else f"({inner})"


def find_roots(distribution: str, releases: list[str] | None, wheel: Path | None) -> dict[str, Path | None]:
    """`{release: root of its source}` for `module_source`."""
    if wheel is not None:
        return {wheel.name: wheel}
    if releases is None:
        installed = versions.installed(distribution)
        releases = list(versions.VERL_TESTED) if distribution == "verl" else [installed] if installed else []
    if not releases:
        raise released_sources.SourceUnavailableError(f"{distribution} is not installed; name a --release")
    return {release: released_sources.get(distribution, release).wheel for release in releases}


if __name__ == "__main__":
    sys.exit(main())
