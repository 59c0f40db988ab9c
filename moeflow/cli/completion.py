"""`moeflow completion SHELL`: the script that gives a shell the completion of groups, options, keys and run folders."""

from __future__ import annotations

from moeflow.cli.arguments import Arguments
from moeflow.errors import ConfigError, did_you_mean

# readline ends words at '=' and ':', so what stands before the last of them must be cut off the candidates again.
_BASH = r"""
_moeflow() {
    local line="${COMP_LINE:0:COMP_POINT}" current before sign IFS=$'\n'
    COMPREPLY=($("${COMP_WORDS[0]}" _complete bash "$line" 2>/dev/null))
    current="${line##*[[:space:]]}"
    before=""
    for sign in = :; do
        if [[ "$COMP_WORDBREAKS" == *"$sign"* && "$current" == *"$sign"* ]]; then
            local head="${current%"$sign"*}$sign"
            if ((${#head} > ${#before})); then before="$head"; fi
        fi
    done
    if [[ -n "$before" ]]; then
        COMPREPLY=("${COMPREPLY[@]#"$before"}")
    fi
}
complete -o nospace -o default -F _moeflow moeflow
"""

_ZSH = r"""
#compdef moeflow
_moeflow() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX" each
    local -a found names shown open_names open_shown
    found=("${(@f)$(moeflow _complete zsh "$line" 2>/dev/null)}")
    for each in $found; do
        local name="${each%%$'\t'*}" text="${each#*$'\t'}"
        if [[ "$name" == *[=.] ]]; then
            open_names+=("$name"); open_shown+=("$name  $text")
        else
            names+=("$name"); shown+=("$name  $text")
        fi
    done
    (( $#names )) && compadd -Q -l -d shown -a names
    (( $#open_names )) && compadd -Q -l -S '' -d open_shown -a open_names
    (( $#names + $#open_names )) || _files
}
if [[ "$funcstack[1]" == "_moeflow" ]]; then
    _moeflow "$@"
else
    compdef _moeflow moeflow
fi
"""

_FISH = r"""
complete -c moeflow -f -a '(moeflow _complete fish (commandline -cp | string collect))'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_INSTALL = {
    "bash": 'eval "$(moeflow completion bash)"   # in ~/.bashrc to keep it',
    "zsh": 'eval "$(moeflow completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "moeflow completion fish | source    # in ~/.config/fish/config.fish to keep it",
}


def main(argv: list[str]) -> int:
    """Print the script of one shell; returns the exit code."""
    parser = Arguments("completion", words="shell")
    args = parser.read(argv)
    if args.help:
        print("\n".join([parser.help_text(), "", "to use it:", *(f"  {line}" for line in _INSTALL.values())]))
        return 0
    if len(args.shell) != 1 or args.shell[0] not in SCRIPTS:
        given = " ".join(args.shell)
        hint = did_you_mean(given, SCRIPTS)
        raise ConfigError(f"there is no completion for '{given}'.{hint}", "moeflow completion bash|zsh|fish")
    print(SCRIPTS[args.shell[0]].strip())
    return 0
