"""`python -m minibatch`: a short tour on real programs; `rules`: the table of rules; `explain`: what batching does."""

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
    _explain_parser(commands)
    args = parser.parse_args(argv)
    if args.command == "rules":
        from minibatch import _support

        print(_support.page() if args.markdown else _support.text())
        return 0
    if args.command == "explain":
        from minibatch._command import run

        return run(args)
    from minibatch.tour import tour

    return 0 if tour() else 1


def _explain_parser(commands: argparse._SubParsersAction) -> None:
    explain = commands.add_parser(
        "explain",
        help="what batching does to a function: which lines get lanes, what that costs, what to mend",
        epilog="The exit status is 1 if there is a finding at least as severe as --fail-on, and 2 if there is no report.",
    )
    explain.add_argument("function", metavar="FILE_OR_MODULE:FUNCTION", help="of one lane, or what vmap made of it")
    explain.add_argument("arguments", metavar="dtype[shape]", nargs="*", help="of each argument, with its lanes: f32[128,3]")
    explain.add_argument("--args-from", metavar="FUNCTION", help="a function beside it that returns the arguments, as a tuple")
    explain.add_argument("--in-axes", help="as for vmap: 0,None or {'x': 0}")
    explain.add_argument("--out-axes", help="as for vmap")
    explain.add_argument("--axis-name", help="as for vmap")
    explain.add_argument("--axis-size", type=int, help="as for vmap")
    explain.add_argument("--divergence", help="as for vmap: lockstep, compact, refill; select, partition")
    explain.add_argument("--memory", default="16GB", help="how much there is, to say how many lanes fit (default: 16GB)")
    explain.add_argument("--analyze", action="store_true", help="run it too, on arguments from --args-from or at random")
    explain.add_argument("--why", metavar="VALUE", help="why an equation, a line or an output differs by lane, and no more")
    explain.add_argument("--full", action="store_true", help="every equation too")
    explain.add_argument("--html", metavar="FILE", help="the report as a page too, in this file")
    explain.add_argument("--json", action="store_true", help="the report as JSON instead")
    explain.add_argument("--width", type=int, help="of a line (default: the terminal's)")
    explain.add_argument("--fail-on", choices=("low", "medium", "high", "never"), default="high", help="default: high")


if __name__ == "__main__":
    sys.exit(main())
