#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the man pages and the completions of shells, from what the program and the headers say of themselves.

usage: scripts/manual.py PROGRAM HEADERS OUT

PROGRAM is kvferry: its --help is printed from the table of options of each verb. HEADERS is include/kvferry. OUT gets
kvferry.1, kvferry.3, kvferry.bash, _kvferry (zsh) and kvferry.fish.
"""

import os
import pathlib
import re
import subprocess
import sys
import typing

DATE = "2026-12-01"  # of the pages; fixed, so that two builds are the same bytes


class Option(typing.NamedTuple):
    letter: str  # "" = none
    name: str
    value: str  # "" = takes none
    help: str


class Verb(typing.NamedTuple):
    name: str
    summary: str
    usage: list[str]
    before: str  # what the help says before the options
    groups: list[tuple[str, list[Option]]]  # title, options
    after: str

    def options(self):
        return [option for _, options in self.groups for option in options]


# ---- the help of the program


def said_by(program, *arguments):
    home = {**os.environ, "HOME": "/nonexistent"}  # help reads no file
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=home)
    if done.returncode != 0:
        sys.exit(f"manual: {program} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


OPTION = re.compile(r"^  (?:-(\w), |    )--([a-z0-9-]+)(?: ([A-Z][^ ]*))?(?: +(.*))?$")


def read_groups(lines):
    """The titled lists of options at the beginning of `lines`, and the lines after them."""
    groups = []
    while lines and lines[0].endswith(":") and len(lines) > 1 and OPTION.match(lines[1]):
        groups.append((lines.pop(0)[:-1], []))
        while lines and lines[0]:
            found = OPTION.match(lines[0])
            line = lines.pop(0)
            if found:
                groups[-1][1].append(Option(*[part or "" for part in found.groups()]))
            else:
                last = groups[-1][1].pop()
                groups[-1][1].append(last._replace(help=f"{last.help} {line.strip()}".strip()))
        while lines and not lines[0]:
            lines.pop(0)
    return groups, lines


def read_verb(program, name, summary):
    lines = said_by(program, name, "--help").splitlines()
    first = next(i for i, line in enumerate(lines[:-1]) if line.endswith(":") and OPTION.match(lines[i + 1]))
    blank = lines.index("")
    usage = [line.removeprefix("usage: ").strip() for line in lines[:blank]]
    groups, after = read_groups(lines[first:])
    return Verb(name, summary, usage, "\n".join(lines[blank + 1 : first]).strip("\n"), groups, "\n".join(after))


def read_program(program):
    text = said_by(program, "--help")
    listed = text.split("\nVerbs:\n")[1].split("\n\n")[0]
    verbs = [read_verb(program, *found) for found in re.findall(r"^  (\w+) +(.+)$", listed, re.MULTILINE)]
    return text, verbs


# ---- man pages


def roff(text):
    """A line as troff prints it unchanged. Hyphens of options are real ones, to be copied; those inside of words are not."""
    text = text.replace("\\", "\\e")
    text = (
        re.sub(r"(?<![A-Za-z0-9])-|-(?=-)", r"\\-", text)
        .replace("'", "\\(aq")
        .replace("`", "\\(ga")
        .replace("^", "\\(ha")
    )
    return re.sub(r"^\.", "\\&.", text.replace("~", "\\(ti"))


def paragraphs(text):
    """Paragraphs; lines that begin with blanks, and such with columns, are shown as they are."""
    out = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        for fixed, lines in runs(block.splitlines()):
            if fixed:
                out += [".PP", ".nf", ".RS 2", *[roff(line) or "\\&" for line in undent(lines)], ".RE", ".fi"]
            else:
                out += [".PP", *[roff(line.strip()) for line in lines]]
    return [line for line in out if line]


def runs(lines):
    found = []
    for line in lines:
        fixed = line.startswith("  ") or bool(found and found[-1][0] and line.startswith(" "))
        if not found or found[-1][0] != fixed:
            found.append((fixed, []))
        found[-1][1].append(line)
    return found


def undent(lines):
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[least:].rstrip() for line in lines]


def page(name, section, what, parts, version):
    head = [
        f'.TH {name.upper()} {section} "{DATE}" "kvferry {version}"',
        ".nh",
        ".ad l",
        ".SH NAME",
        f"{name} \\- {what}",
    ]
    lines = head + parts
    return "".join(line + "\n" for line in (lines[i] for i in range(len(lines)) if not is_idle(lines, i)))


def is_idle(lines, i):
    """.PP before or after a heading, which is a paragraph already."""
    return lines[i] == ".PP" and (lines[i - 1].startswith((".SH", ".SS", ".TP")) or i + 1 == len(lines))


def option_lines(options):
    out = []
    for option in options:
        names = [f"\\fB\\-{option.letter}\\fR"] if option.letter else []
        names.append("\\fB" + roff(f"--{option.name}").replace("-", "\\-").replace("\\\\-", "\\-") + "\\fR")
        value = f" \\fI{roff(option.value)}\\fR" if option.value else ""
        out += [".TP", ", ".join(names) + value, roff(option.help)]
    return out


def program_page(text, verbs, version):
    introduction = text.split("\n\nQuick start")[0].removeprefix("kvferry: ")
    start = text.split("Quick start:\n")[1].split("\n\nVerbs:")[0]
    end = text.split("\n\nkvferry VERB --help")[1]
    shared = verbs[-1].groups[-1][1]  # those of every verb come last in each
    shared = [o for o in shared if all(o in verb.options() for verb in verbs)]
    parts = [
        ".SH SYNOPSIS",
        "\\fBkvferry\\fR \\fIVERB\\fR [\\fIargument\\fR]... [\\fIoption\\fR]...",
        ".br",
        "\\fBkvferry\\fR \\fIVERB\\fR \\fB\\-\\-help\\fR",
        ".SH DESCRIPTION",
        *paragraphs(introduction),
        *paragraphs(start),
    ]
    parts += paragraphs("kvferry VERB --help" + end.split("\nExit codes")[0])
    parts += [".SH OPTIONS OF ALL VERBS", *option_lines(shared), ".SH VERBS"]
    for verb in verbs:
        parts += [f".SS {verb.name}: {roff(verb.summary)}", ".nf", *[roff(line) for line in verb.usage], ".fi"]
        parts += [".PP", *paragraphs(verb.before)[1:]]
        for title, options in verb.groups:
            own = [option for option in options if option not in shared]
            if own:
                parts += [".PP", roff(title) + ":", *option_lines(own)]
        parts += paragraphs(verb.after)
    parts += [".SH ENVIRONMENT"]
    for name, what in (
        ("KVFERRY_STORE", "The store, where --store is not given; several URLs with blanks between them are tiers."),
        ("KVFERRY_SECRET_FILE", "The secret file, where --secret-file is not given; two with a colon between them."),
        (
            "XDG_CACHE_HOME, HOME",
            "The store is in kvferry/store below the first, or .cache/kvferry/store below the "
            "second, where none is named.",
        ),
        ("LD_LIBRARY_PATH", "Where run, explain and inspect -m look for libllama first."),
        ("GOMP_SPINCOUNT, OMP_WAIT_POLICY", "How the threads of llama.cpp wait for each other."),
    ):
        parts += [".TP", f"\\fB{name}\\fR", roff(what)]
    parts += [".SH EXIT STATUS", roff(end.split("\nExit codes: ")[1].strip()), ".SH SEE ALSO", "\\fBkvferry\\fR(3)"]
    return page(
        "kvferry", 1, "keeps the KV cache of prompts in a store, so that a prefix is computed once", parts, version
    )


def comment_text(comment):
    """What stands between /* and */, without the frame and the licence."""
    text = re.sub(r"^[ \t]*\*/?[ \t]?", "", re.sub(r"^/\*+ ?|\s*\*/$", "", comment), flags=re.MULTILINE)
    return text.replace("SPDX-License-Identifier: Apache-2.0", "").strip("\n ")


def bullets(text):
    """Lists as paragraphs, whose lines are not shown as they are."""
    lines, inside = [], False
    for line in text.splitlines():
        start = re.match(r" ?- (.*)", line)
        inside = bool(start) or (inside and line.startswith("  "))
        lines += ["", start[1]] if start else [line.strip() if inside else line]
    return "\n".join(lines)


CALL = re.compile(
    r"(?:^/\*((?:(?!\*/).)*)\*/\n)?^KVF_API\s+(?:KVF_MUST_CHECK\s+)?((?:(?!;).)*);", re.MULTILINE | re.DOTALL
)


def api_page(headers, version):
    order = re.findall(r"^ \* {3}(\w+\.h) ", (headers / "kvferry.h").read_text(), re.MULTILINE) + ["llama.h"]
    parts = [
        ".SH SYNOPSIS",
        ".nf",
        "#include <kvferry/kvferry.h>",
        "",
        "cc prog.c $(pkg\\-config \\-\\-cflags \\-\\-libs kvferry)",
        ".fi",
        ".SH DESCRIPTION",
    ]
    parts += paragraphs(comment_text(re.match(r"/\*.*?\*/", (headers / "kvferry.h").read_text(), re.DOTALL)[0]))
    for name in order:
        if not (headers / name).exists():  # llama.h, in builds without
            continue
        text = (headers / name).read_text()
        parts += [
            f".SH KVFERRY/{name.upper()}",
            *paragraphs(bullets(comment_text(re.match(r"/\*.*?\*/", text, re.DOTALL)[0]))),
        ]
        for comment, prototype in CALL.findall(text):
            function = re.search(r"\b(kvf_\w+)\(", prototype)
            parts += [f".SS {function[1]}", ".nf", *[roff(line) for line in (prototype + ";").splitlines()], ".fi"]
            parts += paragraphs(bullets(comment_text(f"/*{comment}*/"))) if comment else []
    parts += [".SH SEE ALSO", "\\fBkvferry\\fR(1); the headers themselves, which also explain the structs."]
    return page("kvferry", 3, "moves KV blocks between an inference engine and a store", parts, version)


# ---- completions


def choices(option):
    """What an option's value can be: None = a file, [] = nobody knows."""
    if option.value in ("FILE", "MODEL"):
        return None
    if option.value == "URL":
        return ["file:", "mem:", "redis://", "redis+unix://"]
    if option.value == "TYPE":
        return re.findall(r"\b(?:b?f\d+|i?q\d\w+)\b", option.help)
    if option.value == "WHEN":
        return ["on", "off", "auto"]
    return []


def names_of(option):
    return ([f"-{option.letter}"] if option.letter else []) + [f"--{option.name}"]


def unique(words):
    return list(dict.fromkeys(words))


def bash(verbs):
    takes, options = [], []
    for verb in verbs:
        options.append(f"        {verb.name}) words='{' '.join('--' + option.name for option in verb.options())}' ;;")
        for option in verb.options():
            if option.value:
                known = choices(option)
                what = "kind=files" if known is None else f"words='{' '.join(known)}'" if known else "kind=nothing"
                takes.append(f"        {' | '.join(f'{verb.name}:{name}' for name in names_of(option))}) {what} ;;")
    names = " ".join(verb.name for verb in verbs)
    return f"""# SPDX-License-Identifier: Apache-2.0
#
# Completes kvferry in bash. Made by scripts/manual.py from kvferry --help.
_kvferry() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} verb=${{COMP_WORDS[1]}} words= kind=words i
    if ((COMP_CWORD == 1)); then
        words='{names} help --help --version'
    elif [[ $verb == help ]]; then
        words='{names}'
    else
        for ((i = 2; i < COMP_CWORD; i++)); do # after "--": a program, and what belongs to it
            [[ ${{COMP_WORDS[i]}} != -- ]] || {{ kind=program; break; }}
        done
        [[ $kind == program || $prev != -* ]] || case $verb:$prev in
{chr(10).join(takes)}
        esac
        [[ $kind != words || -n $words || $cur != -* ]] || case $verb in
{chr(10).join(options)}
        esac
        [[ $kind != words || -n $words ]] || kind=files
    fi
    case $kind in
        words) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur") ;;
        files) mapfile -t COMPREPLY < <(compgen -f -- "$cur") && compopt -o filenames 2>/dev/null ;;
        program)
            if ((i + 1 == COMP_CWORD)); then
                mapfile -t COMPREPLY < <(compgen -c -- "$cur")
            else
                mapfile -t COMPREPLY < <(compgen -f -- "$cur") && compopt -o filenames 2>/dev/null
            fi ;;
        nothing) COMPREPLY=() ;;
    esac
    [[ $kind != words || ${{COMPREPLY[0]-}} != *[:/] ]] || compopt -o nospace 2>/dev/null
    return 0
}}
complete -F _kvferry kvferry
"""


def zsh_text(text):
    return re.sub(r"([][\\:])", r"\\\1", text).replace("'", "'\\''")


PROGRAM_IN_ZSH = """            local -i at=${words[(i)--]}
            if ((at < CURRENT)); then
                words=("${(@)words[at + 1,-1]}")
                ((CURRENT -= at))
                _normal
                return
            fi
"""


def zsh(verbs):
    cases = []
    for verb in verbs:
        lines = []
        for option in verb.options():
            known = choices(option)
            value = (
                ""
                if not option.value
                else ":"
                + zsh_text(option.value)
                + ":"
                + (
                    "_files"
                    if known is None
                    else f"({' '.join(word.replace(':', chr(92) + ':') for word in known)})"
                    if known
                    else " "
                )
            )
            names = names_of(option)
            head = f"'({' '.join(names)})'{{{','.join(names)}}}" if len(names) > 1 else names[0]
            again = "'*'" if option.name in ("store", "secret-file", "field") else ""
            head = again + (f"{{{','.join(names)}}}" if again and len(names) > 1 else names[0]) if again else head
            lines.append(f"            {head}'[{zsh_text(option.help)}]{value}' \\")
        first = PROGRAM_IN_ZSH if verb.name == "exec" else ""
        cases.append(
            f"        {verb.name})\n{first}            _arguments -s -S \\\n"
            + "\n".join(lines)
            + "\n            '*:file:_files' ;;"
        )
    listed = "\n".join(f"        '{verb.name}:{zsh_text(verb.summary)}'" for verb in verbs)
    return f"""#compdef kvferry
# SPDX-License-Identifier: Apache-2.0
#
# Completes kvferry in zsh. Made by scripts/manual.py from kvferry --help.
_kvferry() {{
    local context state state_descr line
    typeset -A opt_args
    local -a verbs=(
{listed}
    )
    _arguments -C '--help[all verbs]' '--version[the version]' '1:verb:->verb' '*::argument:->argument'
    case $state in
    verb) _describe verb verbs ;;
    argument)
        case $line[1] in
{chr(10).join(cases)}
        help) _describe verb verbs ;;
        esac ;;
    esac
}}
_kvferry "$@"
"""


def fish(verbs):
    def quoted(text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "#",
        "# Completes kvferry in fish. Made by scripts/manual.py from kvferry --help.",
        "complete -c kvferry -n __fish_use_subcommand -f -l help -d 'all verbs'",
        "complete -c kvferry -n __fish_use_subcommand -f -l version -d 'the version'",
        "complete -c kvferry -n '__fish_seen_subcommand_from exec; and contains -- -- (commandline -opc)' "
        "-xa '(__fish_complete_subcommand --fcs-skip=(math (contains -i -- -- (commandline -opc)) ))'",
    ]
    for verb in verbs:
        lines.append(f"complete -c kvferry -n __fish_use_subcommand -fa {verb.name} -d {quoted(verb.summary)}")
        for option in verb.options():
            known = choices(option)
            value = "" if not option.value else " -r -F" if known is None else f" -xa {quoted(' '.join(known))}"
            letter = f" -s {option.letter}" if option.letter else ""
            lines.append(
                f"complete -c kvferry -n '__fish_seen_subcommand_from {verb.name}'{letter} -l {option.name}{value} "
                f"-d {quoted(option.help)}"
            )
    return "".join(line + "\n" for line in lines)


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    program, headers, out = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    version = said_by(program, "--version").split()[1]
    text, verbs = read_program(program)
    out.mkdir(parents=True, exist_ok=True)
    for name, made in (
        ("kvferry.1", program_page(text, verbs, version)),
        ("kvferry.3", api_page(headers, version)),
        ("kvferry.bash", bash(verbs)),
        ("_kvferry", zsh(verbs)),
        ("kvferry.fish", fish(verbs)),
    ):
        (out / name).write_text(made)


if __name__ == "__main__":
    main()
