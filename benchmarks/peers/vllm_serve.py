"""Runs `vllm serve` with its options if that command is missing because vLLM is in a folder of PYTHONPATH. Unlike
`vllm.entrypoints.openai.api_server`, it supports several API processes (`--api-server-count`).
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
