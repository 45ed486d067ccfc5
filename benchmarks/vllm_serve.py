"""`vllm serve` where that command is not there, since vLLM lies in a folder of PYTHONPATH: `python -m` this, with its
options. Unlike `vllm.entrypoints.openai.api_server` it can have several API processes (`--api-server-count`).
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    command = ServeSubcommand()
    parser = FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args()
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":  # vLLM's processes import this module
    main()
