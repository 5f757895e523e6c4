"""`penstock completion`: a script that lets a shell complete verbs and options."""

from __future__ import annotations

import argparse
import shlex

from penstock.commands.base import Command, Outcome

SHELLS = ("bash", "zsh", "fish")
_BASH = """\
_penstock() {{
    local words current=${{COMP_WORDS[COMP_CWORD]}}
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{verbs}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    if [ "$COMP_CWORD" -eq 1 ] || [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
}}
complete -o default -F _penstock penstock
"""


def script(shell: str) -> str:
    """Return the script for a shell, made from the parser itself."""
    from penstock.commands.parser import build_parser

    parser, commands = build_parser()
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    options: dict[str, list[tuple[str, str]]] = {}
    for name in commands:
        options[name] = [
            (word, action.help if action.help not in (None, argparse.SUPPRESS) else "")
            for action in verbs.choices[name]._actions
            for word in action.option_strings
            if word.startswith("--") and not hasattr(action, "new")
        ]
    if shell == "fish":
        return _fish(options, {name: command.summary for name, command in commands.items()})
    cases = "\n".join(
        f'            {name}) words="{" ".join(word for word, _ in found)}" ;;'
        for name, found in options.items()
    )
    text = _BASH.format(verbs=" ".join(options), cases=cases)
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def _fish(options: dict[str, list[tuple[str, str]]], summaries: dict[str, str]) -> str:
    lines = []
    for name, found in options.items():
        summary = shlex.quote(summaries[name])
        lines.append(f"complete -c penstock -n __fish_use_subcommand -a {name} -d {summary}")
        for word, text in found:
            given = f"-n '__fish_seen_subcommand_from {name}' -l {word[2:]}"
            lines.append(f"complete -c penstock {given} -d {shlex.quote(text)}")
    return "\n".join(lines) + "\n"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def _run(arguments: argparse.Namespace) -> Outcome:
    text = script(arguments.shell)
    return Outcome(text.rstrip("\n"), {"script": text})


COMMAND = Command(
    "print a script that completes verbs and options in a shell",
    "Verbs and options are completed, and files for the rest. To have it always:\n"
    "  bash   source <(penstock completion bash)   in ~/.bashrc\n"
    "  zsh    source <(penstock completion zsh)    in ~/.zshrc\n"
    "  fish   penstock completion fish > ~/.config/fish/completions/penstock.fish",
    "penstock completion bash",
    _add_arguments,
    _run,
)
