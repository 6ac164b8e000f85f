"""`stead git`: Git repositories."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli import cloning
from stead.cli.connection import connected, for_completion
from stead.cli.if_missing import IfMissing, check_if_missing, note_existing
from stead.cli.output import (
    Json,
    ago,
    bytes_text,
    note,
    print_facts,
    print_json,
    print_table,
    printable,
    show_progress,
    to_plain,
)
from stead.cli.references import SHORTEST, Suggestion, matching

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk.git_models import GithubSync, RepoInfo
    from stead.sdk.search_models import LineMatch

app = typer.Typer(no_args_is_help=True, help="Create, clone, search and sync Git repositories.")

_PAGE = 100
_NAMED = 10
"""Number of branches or tags listed by name."""


def _complete_repo(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    try:
        with for_completion(context) as stead:
            return list(matching(incomplete, _candidates(stead, incomplete or None)))
    except Exception:
        return []


_HELP = f"Repository: id, id prefix ({SHORTEST} characters or more) or name."
Repo = Annotated[str, typer.Argument(metavar="REPO", help=_HELP, autocompletion=_complete_repo)]
Repos = Annotated[list[str], typer.Argument(metavar="REPO", help=_HELP, autocompletion=_complete_repo)]


def find_repo(stead: "Stead", given: str) -> str:
    """The id of a repository, by its id, an id prefix, or its name."""
    return stead.git.repos.find(given).id


def _candidates(stead: "Stead", search: str | None) -> Iterator[Suggestion]:
    offset = 0
    while True:
        page = stead.git.repos.list(limit=_PAGE, offset=offset, search=search)
        yield from (Suggestion(each.id, each.name, each.visibility or "") for each in page)
        offset += len(page)
        if not len(page) or offset >= page.total:
            return


@app.command("create")
def create_repo(
    name: Annotated[str | None, typer.Option("--name", "-n", help="Name of the repository.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Allow anyone to read it.")] = False,
    default_branch: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Default branch (default: main).")
    ] = None,
    source_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Import this repository with its history.")
    ] = None,
    source_rev: Annotated[
        str | None, typer.Option(metavar="REV", help="Import only this branch, tag or commit.")
    ] = None,
    if_missing: IfMissing = False,
    as_json: Json = False,
) -> None:
    """Create a repository and print its id."""
    check_if_missing(if_missing, name)
    if source_rev is not None and source_url is None:
        raise typer.BadParameter("requires --source-url", param_hint="--source-rev")
    with connected() as stead:
        from stead.sdk.git_models import Source

        source = None if source_url is None else Source(source_url, source_rev)
        with show_progress("creating repository"):
            repo = stead.git.repos.create(
                name=name,
                public=public,
                default_branch=default_branch,
                source=source,
                if_missing=if_missing,
            )
        url = repo.clone_url()
    if as_json:
        print_json({"id": repo.id, "name": name, "clone_url": url, "created": repo.created})
        return
    typer.echo(repo.id)
    note_existing("repository", repo.id, repo.created)
    note(f"{url} (clone it with `stead git clone {repo.id[:8]}`)")


@app.command("list")
def list_repos(
    limit: Annotated[int, typer.Option(min=1, max=_PAGE, help="Maximum number of repositories.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Number of repositories to skip.")] = 0,
    search: Annotated[str | None, typer.Option(help="Filter by part of an id or name.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only ids.")] = False,
    as_json: Json = False,
) -> None:
    """List repositories, newest first."""
    with connected() as stead:
        found = stead.git.repos.list(limit=limit, offset=offset, search=search)
    if as_json:
        print_json(found)
        return
    if quiet:
        for each in found:
            typer.echo(each.id)
    else:
        rows = [
            (
                each.id,
                each.name,
                each.visibility,
                each.default_branch,
                len(each.branches),
                len(each.tags),
                bytes_text(each.size_bytes),
                ago(each.created_at),
            )
            for each in found
        ]
        headings = ("id", "name", "visibility", "default", "branches", "tags", "size", "created")
        print_table(headings, rows, "no repositories")
    if (end := offset + len(found)) < found.total:
        note(f"{found.total - end} more: --offset {end}")


@app.command("get")
def get_repo(repo: Repo, as_json: Json = False) -> None:
    """Show a repository: branches, tags, size, clone URL."""
    with connected() as stead:
        handle = stead.git.repos.ref(find_repo(stead, repo))
        info = handle.info()
        url = handle.clone_url()
    if as_json:
        print_json({**to_plain(info), "clone_url": url})
        return
    created = None if info.created_at is None else f"{info.created_at.astimezone():%Y-%m-%d %H:%M:%S %Z}"
    print_facts(
        [
            ("id", info.id),
            ("name", info.name),
            ("visibility", info.visibility),
            ("default branch", info.default_branch),
            ("branches", _names(sorted(info.branches))),
            ("tags", _names(sorted(info.tags))),
            ("size", bytes_text(info.size_bytes)),
            ("created", created),
            ("clone", url),
        ]
    )


def _names(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


@app.command("delete")
def delete_repos(repos: Repos, as_json: Json = False) -> None:
    """Delete repositories permanently, with their history."""
    with connected() as stead:
        ids = list(dict.fromkeys(find_repo(stead, each) for each in repos))
        for repo_id in ids:
            stead.git.repos.delete(repo_id)
            if not as_json:
                typer.echo(f"deleted {repo_id}")
    if as_json:
        print_json({"repos": [{"id": repo_id, "deleted": True} for repo_id in ids]})


@app.command("clone")
def clone_repo(
    repo: Repo,
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Target folder (default: the repository's name or id)."),
    ] = None,
    readonly: Annotated[
        bool, typer.Option("--readonly", help="Give the clone read access only: it cannot push.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Clone a repository with git, and store a token so that fetch and push work.

    The token belongs to a new identity with access to this repository only. To revoke it: `stead identity
    delete $(git config stead.identityId)`.
    """
    with connected() as stead:
        info = stead.git.repos.ref(find_repo(stead, repo)).info()
        done = cloning.clone(stead, info, directory or _folder(info), "read" if readonly else "write")
    if as_json:
        print_json(done)
    else:
        typer.echo(f"cloned {info.id} into {done.path}")


def _folder(info: "RepoInfo") -> Path:
    """The repository's name if it is valid as a folder name, else its id."""
    return Path(info.name if info.name and re.fullmatch(r"\w[\w.-]*", info.name) else info.id)


@app.command("sync")
def sync_repo(
    repo: Repo,
    with_: Annotated[
        str | None,
        typer.Option(
            "--with", metavar="OWNER/NAME", help="Enable sync with this GitHub repository (owner/name)."
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Sync now and wait for the result.")] = False,
    off: Annotated[
        bool, typer.Option("--off", help="Disable sync; both repositories stay as they are.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the GitHub sync of a repository, or enable, run or disable it.

    The exit code is 1 if the last sync failed or some branches or tags conflict.
    """
    if off and (with_ or now):
        raise typer.BadParameter("cannot be combined with --with or --now", param_hint="--off")
    with connected() as stead:
        github = stead.git.repos.ref(find_repo(stead, repo)).github_sync
        if off:
            github.disable()
        elif with_ is not None:
            github.enable(with_)
        with show_progress("syncing") if now else contextlib.nullcontext():
            link = github.run() if now else github.get()
    if as_json:
        print_json({"github_sync": link})
    elif link is None:
        typer.echo("GitHub sync is off")
    else:
        _print_link(link)
    if link is not None and link.state in ("diverged", "failed"):
        raise typer.Exit(1)


def _print_link(link: "GithubSync") -> None:
    synced = "never" if link.last_synced_at is None else ago(link.last_synced_at)
    facts = [("github", link.github_repo_name), ("state", link.state), ("last synced", synced)]
    print_facts([*facts, *([("error", link.error)] if link.error else [])])
    if link.divergences:
        rows = [
            (each.ref, (each.here or "none")[:12], (each.there or "none")[:12], each.reason)
            for each in link.divergences
        ]
        print_table(("ref", "here", "github", "why"), rows, "")


@app.command("search")
def search_repo(
    repo: Repo,
    query: Annotated[str, typer.Argument(help="Text to search for.")],
    rev: Annotated[
        str | None, typer.Option(help="Branch, tag or commit (default: the default branch).")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Search only in paths that match, such as 'src/**/*.py'."),
    ] = None,
    exclude: Annotated[str | None, typer.Option(metavar="GLOB", help="Skip paths that match.")] = None,
    regex: Annotated[bool, typer.Option("--regex", "-E", help="Treat TEXT as a regular expression.")] = False,
    word: Annotated[bool, typer.Option("--word", "-w", help="Match whole words only.")] = False,
    case: Annotated[bool, typer.Option("--case", help="Match case.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of files.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="Number of files to skip.")] = 0,
    as_json: Json = False,
) -> None:
    """Search the files of a repository and print matching lines like grep -n."""
    with connected() as stead:
        found = stead.git.repos.ref(find_repo(stead, repo)).search(
            query,
            rev=rev,
            path_pattern=path,
            exclude_pattern=exclude,
            is_regex=regex,
            whole_word=word,
            case_sensitive=case,
            max_results=limit,
            offset=offset,
        )
    if as_json:
        print_json(found)
        return
    for file in found:
        for match in file:
            typer.echo(_line(file.path, match))
    if not len(found):
        note("nothing found")
    if found.stopped_early:
        note("the search stopped early: narrow it down with --path")
    elif found.has_more:
        note(f"{found.total_files - offset - len(found)} more files: --offset {offset + len(found)}")


def _line(path: str, match: "LineMatch") -> str:
    """A match in the colours of grep."""
    line, start, end = match.line, match.start_column, match.end_column
    parts = (
        typer.style(printable(path), fg="magenta"),
        typer.style(str(match.line_number), fg="green"),
        _text(line[:start]) + typer.style(_text(line[start:end]), fg="red", bold=True) + _text(line[end:]),
    )
    return typer.style(":", fg="cyan").join(parts)


def _text(line: str) -> str:
    return "\t".join(map(printable, line.split("\t")))
