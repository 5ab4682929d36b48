"""`python -m minibatch`: a short tour on real programs; `python -m minibatch rules`: the table of rules."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv`; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minibatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("tour", help="map real programs, check them lane by lane, time them (the default)")
    rules = commands.add_parser("rules", help="which primitives have a batching rule, and where it is")
    rules.add_argument("--markdown", action="store_true", help="as the page docs/support.md")
    args = parser.parse_args(argv)
    if args.command == "rules":
        from minibatch import _support

        print(_support.page() if args.markdown else _support.text())
        return 0
    from minibatch.tour import tour

    return 0 if tour() else 1


if __name__ == "__main__":
    sys.exit(main())
