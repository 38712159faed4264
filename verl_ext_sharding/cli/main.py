"""`verl-sharding`: the command line of verl-ext-sharding."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence

from verl_ext_sharding.errors import ShardingError
from verl_ext_sharding.versions import __version__

_EXAMPLES = """\
examples:
  verl-sharding plan trainer.n_gpus_per_node=4 'sharding.roles.critic.devices=[2,3]'
  SFT: verl-sharding plan --config-name sft_trainer_engine trainer.n_gpus_per_node=4
"""

_JSON = "tables as JSON on standard output; errors stay text on standard error, exit code 2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; errors of ours are printed without a traceback.

    An interrupt gives 130, as shells count it, and 1 a reader of the output that has left (`verl-sharding plan --json | head`).
    """
    parser = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, rest = parser.parse_known_args(words)
    flags = [word for word in rest if word.startswith("-")]
    if hasattr(options, "overrides") and (pasted := _pasted(words[1:])):
        parser.error(pasted)
    if flags or (rest and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(flags or rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]  # argparse takes overrides on one side of a flag only
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except ShardingError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more as it ends
        return 1


def _pasted(words: Sequence[str]) -> str | None:
    """What to leave out of a command that was pasted whole, such as `python -m verl.trainer.main_ppo <overrides>`."""
    ends = (index + (word == "-m") for index, word in enumerate(words) if word == "-m" or _is_script(word))
    end = next(ends, None)
    if end is None:
        return None
    launch = " ".join(itertools.dropwhile(lambda word: word.startswith("--"), words[: end + 1]))
    sft = ", with --config-name sft_trainer_engine" if "sft_trainer" in launch else ""
    return f"leave out `{launch}`: give its overrides alone{sft}"


def _is_script(word: str) -> bool:
    return word.endswith(".py") and "=" not in word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-sharding", description="Each model of a verl job on its own devices, planned before launch."
    )
    parser.add_argument("--version", action="version", version=f"verl-ext-sharding {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_demo(commands)
    _add_plan(commands)
    _add_doctor(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="train a tiny model for a few PPO steps, each role on its own device")
    demo.add_argument("--steps", type=int, default=3, help="PPO steps (default 3)")
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    demo.add_argument("--verbose", action="store_true", help="show everything that verl and Ray print")
    demo.add_argument("overrides", nargs="*", help="further overrides for verl.trainer.main_ppo")
    demo.set_defaults(run=_demo)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a command would do, without starting anything",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("--placement", action="store_true", default=True, help="kept for scripts: the one table there is")
    plan.add_argument("--config-name", default="ppo_trainer", help="primary config (default ppo_trainer)")
    plan.add_argument("--config-path", help="folder of a recipe's configs (default: verl's own)")
    plan.add_argument("--json", action="store_true", help=_JSON)
    plan.add_argument("overrides", nargs="*", help="the overrides of your python -m verl.trainer.main_ppo command")
    plan.set_defaults(run=_plan)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="what is installed, what is active, which patches fit")
    doctor.add_argument("--env", action="store_true", help="how this node communicates: variables of a run, and why")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(run=_doctor)


def _demo(options: argparse.Namespace) -> int:
    from verl_ext_sharding.demo import runner

    return runner.run(
        steps=options.steps, device=options.device, verbose=options.verbose, overrides=tuple(options.overrides)
    )


def _plan(options: argparse.Namespace) -> int:
    from verl_ext_sharding.cli import plan

    return plan.run(
        overrides=options.overrides,
        config_name=options.config_name,
        config_path=options.config_path,
        as_json=options.json,
    )


def _doctor(options: argparse.Namespace) -> int:
    from verl_ext_sharding.cli import doctor

    return doctor.show_env(as_json=options.json) if options.env else doctor.run(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
