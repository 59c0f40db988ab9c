"""`moeflow recipes`: list, show and copy what `+recipe=NAME` finds."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from moeflow.cli.arguments import Arguments, add_config_dir
from moeflow.cli.help import recipes_text
from moeflow.cli.runs import shown
from moeflow.config.options import check_config_dirs
from moeflow.config.plain import read_text
from moeflow.config.recipes import RecipeBook
from moeflow.errors import ConfigError
from moeflow.train.files import write_atomic


def arguments() -> Arguments:
    """Return the flags of `moeflow recipes`."""
    parser = Arguments("recipes", words="names")
    parser.flag("--copy", metavar="DIR", help="write a copy of the recipe to DIR/recipe/my_NAME.yaml, to be changed")
    parser.flag("--as", metavar="NAME", dest="new_name", help="name of the copy")
    add_config_dir(parser)
    return parser


def main(argv: list[str]) -> int:
    """List the recipes, or show or copy one; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    folders = [Path(folder) for folder in args.config_dir]
    check_config_dirs(folders)
    if not args.names:
        _needs_name(args)
        print(recipes_text(folders))
        print("\nnext  moeflow recipes cifar_moe")
        return 0
    if len(args.names) > 1:
        raise ConfigError(f"'{args.names[1]}': moeflow recipes takes one name.", f"moeflow recipes {args.names[0]}")
    flags = "".join(f" --config-dir {shlex.quote(folder)}" for folder in args.config_dir if folder != args.copy)
    book = RecipeBook(folders)
    if args.copy is not None:
        _copy(book, args.names[0], Path(args.copy), args.new_name, flags)
    else:
        _needs_name(args)
        _show(book, args.names[0], flags)
    return 0


def _needs_name(args: argparse.Namespace) -> None:
    if args.copy is not None:
        raise ConfigError("--copy needs the name of a recipe.", f"moeflow recipes cifar_moe --copy {args.copy}")
    if args.new_name is not None:
        raise ConfigError("--as names the copy that --copy makes.", "moeflow recipes cifar_moe --copy DIR --as NAME")


def _show(book: RecipeBook, name: str, flags: str) -> None:
    chain = book.chain(name)
    print(f"# {shown(chain[-1].path)}")
    if len(chain) > 1:
        print(f"# builds on {', '.join(recipe.name for recipe in chain[:-1])}")
    print(read_text(chain[-1].path, "recipe").rstrip())
    choices = " ".join(f"{group}={option}" for group, option in book.choices(name).items())
    print(f"\nchoices  {choices}")
    print(f"next     moeflow train{flags} +recipe={name}")
    print(f"         moeflow recipes{flags} {name} --copy my_configs")


def _copy(book: RecipeBook, name: str, folder: Path, new_name: str | None, flags: str) -> None:
    """Write the recipe to FOLDER/recipe, where --config-dir FOLDER finds it."""
    new_name = f"my_{name}" if new_name is None else new_name
    if not new_name.isidentifier():
        raise ConfigError(f"--as {new_name}: a recipe's name is letters, digits and underscores.", f"--as my_{name}")
    if new_name in book.options:
        raise ConfigError(f"there is a recipe '{new_name}' already ({book.options[new_name].path}).", "--as NEW_NAME")
    text = read_text(book.get(name).path, "recipe")
    # The command in its comments is to start the copy.
    text = text.replace(f"+recipe={name}", f"--config-dir {shlex.quote(str(folder))} +recipe={new_name}")
    target = folder / "recipe" / f"{new_name}.yaml"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise ConfigError(f"{target} exists; nothing was written.", "--as NEW_NAME, or another --copy DIR")
        write_atomic(target, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}.", "--copy DIR on a disk you may write to"
        ) from error
    print(f"copied {name} to {target}")
    print(f"next  moeflow train{flags} --config-dir {shlex.quote(str(folder))} +recipe={new_name}")
