"""``vllm serve``, whatever the distribution is called."""

from __future__ import annotations

import sys

from moved_names import moved  # beside this script


def main(arguments: list[str]) -> None:
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    moved("cli_env_setup")()
    parser = FlexibleArgumentParser()
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *arguments])
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main(sys.argv[1:])
