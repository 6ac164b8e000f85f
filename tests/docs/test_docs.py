"""Every example in README.md and docs/ is run. The rules are in `documents.py`."""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import pytest_asyncio

from stead.api.errors import from_product
from stead.cli.commands import ENTRIES, _loaded
from stead.errors import SteadError
from stead.limits import LimitExceeded, LimitName, Limits
from stead.repos.errors import RepoLimitExceeded
from stead.repos.quotas import QuotaExceeded
from stead.settings import Settings
from support import ROOT
from support.documents import Block, Session, blocks, commands, matches, name_of, pages
from support.installations import Server

PAGES = [pytest.param(page, id=name_of(page)) for page in pages()]
_TRIAL = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]
LONG = dict.fromkeys(("docs/guides.md", "docs/recipes.md", "docs/ssh.md"), _TRIAL)
"""Pages whose examples take minutes in an emulated VM: run by `make trials`."""
SESSIONS = [
    pytest.param(page, id=name_of(page), marks=LONG.get(name_of(page), ()))
    for page in pages()
    if any(block.is_run for block in blocks(page))
]

ABOUT_ONE_INTERFACE = {
    "README",
    "cli",
    "mcp",
    "python-sdk",
    "recipes",
    "guides",
    "install",
    "operate",
    "public-installation",
    "openai-agents",
    "openai-agents-typescript",
    "mastra",
    "smithers",
    "claude-agent-sdk",
    "coming-from",
}
"""All other pages for users show the SDK, the command line and HTTP side by side."""
MARKS = {"file", "body", "answer", "output", "not run", "part of", "run by"}
GLOBAL_OPTIONS = {"--url", "--key", "--key-file", "--json", "--help", "-h"}
NOT_RUN = {
    "README.md": 2,
    "docs/claude-agent-sdk.md": 2,
    "docs/guides.md": 1,
    "docs/image.md": 1,
    "docs/install.md": 1,
    "docs/mastra.md": 1,
    "docs/openai-agents-typescript.md": 1,
    "docs/openai-agents.md": 1,
    "docs/operate.md": 2,
    "docs/smithers.md": 1,
    "docs/ssh.md": 1,
}
"""How many blocks of each page have the comment `not run`. Each has its reason in the page."""


@pytest_asyncio.fixture
async def session(
    request: pytest.FixtureRequest, server: Server, settings: Settings
) -> AsyncIterator[Session]:
    """A shell of somebody who has an account of their own, and the data folder of the server."""
    installation = server.installation
    account = await installation.accounts.create(request.node.callspec.id.replace("/", "."))
    _, key = await installation.accounts.create_key(account.id)
    with tempfile.TemporaryDirectory(prefix="stead-docs-", dir="/var/tmp") as folder:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": folder,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "STEAD_API_URL": server.url,
            "STEAD_API_KEY": key,
            "STEAD_DATA": str(settings.data),
            "STEAD_CACHE": str(settings.cache_folder),
            "STEAD_CA": str(settings.ca or ""),
            "STEAD_DEFAULT_SIZE": str(settings.default_size),
            "GIT_CONFIG_GLOBAL": f"{folder}/.gitconfig",
        }
        Path(folder, ".gitconfig").write_text(
            "[user]\nname = Ann\nemail = ann@example.com\n[init]\ndefaultBranch = main\n"
        )
        shell = await Session.open(Path(folder), environment)
        try:
            yield shell
        finally:
            await shell.close()
            for vm in await installation.machines.list(account.id, deleted=True):
                await installation.machines.delete(vm.id, forget=True)
            for snapshot in await installation.machines.snapshots.list(account.id):
                await installation.machines.snapshots.delete(snapshot.id)


@pytest.mark.parametrize("page", SESSIONS)
async def test_examples_of_a_page_run_in_order(page: Path, session: Session) -> None:
    printed = ""
    limit = 3600 if name_of(page) in LONG else 300
    for block in blocks(page):
        where = f"{name_of(page)}, {block}"
        if block.mark == "output":
            assert matches(block.body.splitlines(), printed), (
                f"{where} shows\n{block.body}\nbut it was\n{printed}"
            )
        elif block.mark == "file":
            target = session.folder / block.text
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.body)
        elif not block.is_run:
            continue
        elif block.language == "python":
            (session.folder / ".example.py").write_text(block.body)
            status, printed = await session.run("python .example.py", limit)
            assert status == 0, f"{where}\n{block.body}\n{printed}"
        else:
            for command in commands(block.body):
                status, printed = await session.run(command.line, limit)
                told = f"{where}\n$ {command.line}\n{printed}\n(exit status {status})"
                assert (status != 0) == command.fails, told
                if command.output:
                    shown = "\n".join(command.output)
                    assert matches(list(command.output), printed), f"{told}\nthe page shows\n{shown}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    for block in blocks(page):
        assert block.mark in {None, *MARKS}, str(block)
        match block.language:
            case "python" | "console":
                assert block.mark in {None, "not run", "part of", "run by"}, f"{block}: {block.mark}"
            case "json":
                assert block.mark is not None, f"{block}: say what it is in a comment before it"
            case _:
                assert block.mark is not None, f"{block} is neither run nor marked"
        if block.not_run:
            assert len(block.text) > 10, f"{block}: say why it is not run"


@pytest.mark.parametrize("page", PAGES)
def test_parts_of_files_are_in_these_files(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "part of":
            assert block.body in (ROOT / block.text).read_text(), f"{block} is not in {block.text}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_read_by_the_tests_that_they_name(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "run by":
            reads = f'run_by(__file__, "{name_of(page)}")'
            assert reads in (ROOT / block.text).read_text(), f"{block}: {block.text} does not read it"


def test_blocks_that_are_not_run_are_counted() -> None:
    counts = {name_of(page): sum(block.not_run for block in blocks(page)) for page in pages()}
    assert {name: count for name, count in counts.items() if count} == NOT_RUN


@pytest.mark.parametrize("page", PAGES)
def test_python_and_shell_blocks_are_well_formed(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.body, f"{name_of(page)}:{block.line}", "exec")
            assert "stead.machines" not in block.body, f"{block} teaches the engine instead of the SDK"
        elif block.language == "console":
            script = "\n".join(command.line for command in commands(block.body))
            script = re.sub(r"<[a-z ]+>", "PLACEHOLDER", script)
            checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
            assert checked.returncode == 0, f"{block}\n{script}\n{checked.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_every_stead_command_and_option_in_a_page_exists(page: Path) -> None:
    """Also in blocks that are not run."""
    for block in blocks(page):
        if block.language != "console":
            continue
        for command in commands(block.body):
            for words in re.findall(
                r"(?:^|[|;&(]|\bsudo )\s*(?:\.venv/bin/)?stead( [^|;&)\n]*)", command.line
            ):
                _check_words(words.split(" -- ")[0].split(), f"{name_of(page)}, {block}: stead{words}")


def _check_words(words: list[str], where: str) -> None:
    path: list[str] = []
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in {"--url", "--key", "--key-file"}:
            words.pop(0)
    group: Any = None
    for word in words:
        if group is None and not path:
            assert word in ENTRIES, f"{where}: no command {word}"
            path.append(word)
            group = _loaded(word)
        elif hasattr(group, "commands") and word in group.commands:
            path.append(word)
            group = group.commands[word]
        elif hasattr(group, "commands") and not word.startswith("-"):
            raise AssertionError(f"{where}: no command {word}")
        else:
            break
    if not path:
        return
    known = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", " ".join(words))
    if path[:2] == ["vm", "exec"]:
        # What follows the VM's name belongs to the command inside it.
        text = text.split(" TEXT")[0]
        text = re.match(r"vm exec(?: -{1,2}\S+(?: \S+)?)*", text)[0]  # type: ignore[index]
    for option in re.findall(r"(?<=\s)--?[a-z][\w-]*", text):
        assert option in known | GLOBAL_OPTIONS, f"{where}: no option {option}"


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    from stead.api.app import create_app

    return create_app().openapi()


def _json_blocks() -> Iterator[Any]:
    for page in pages():
        for block in blocks(page):
            if block.language == "json":
                yield pytest.param(block, id=f"{name_of(page)}:{block.line}")


@pytest.mark.parametrize("block", list(_json_blocks()))
def test_json_examples_fit_the_call_that_they_belong_to(block: Block, openapi: dict[str, Any]) -> None:
    content = json.loads(block.body)
    if block.mark not in {"body", "answer"}:
        return  # written to a file for a command, or not run: that it parses is all there is to check
    method, _, path = block.text.partition(" ")
    call = openapi["paths"][path][method.lower()]
    holder = call["requestBody"] if block.mark == "body" else call["responses"]["200"]
    schema = {**holder["content"]["application/json"]["schema"], "components": openapi["components"]}
    jsonschema_rs.validator_for(schema).validate(content)
    assert _unknown(content, schema, openapi) == [], f"{block}: keys that {block.text} does not know"


def _unknown(value: Any, schema: dict[str, Any], openapi: dict[str, Any], path: str = "") -> list[str]:
    """The keys of a document that its schema does not name."""
    if "$ref" in schema:
        return _unknown(value, openapi["components"]["schemas"][schema["$ref"].split("/")[-1]], openapi, path)
    choices = [*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())]
    if choices:
        return min((_unknown(value, each, openapi, path) for each in choices), key=len)
    found: list[str] = []
    if isinstance(value, list):
        for each in value:
            found += _unknown(each, schema.get("items", {}), openapi, path)
    elif isinstance(value, dict):
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", False)
        for key, each in value.items():
            if key in known:
                found += _unknown(each, known[key], openapi, f"{path}.{key}")
            elif isinstance(others, dict):
                found += _unknown(each, others, openapi, f"{path}.{key}")
            elif others is False:
                found.append(f"{path}.{key}")
    return found


def test_every_link_between_documents_leads_somewhere() -> None:
    for page in [*pages(), *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_link_to_a_heading_leads_to_one() -> None:
    for page in pages():
        for target, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
            if "://" in target:
                continue
            text = ((page.parent / target) if target else page).read_text()
            headings = {_anchor(found) for found in re.findall(r"^#+ (.*)$", text, re.M)}
            assert heading in headings, f"{page.name} links to {target}#{heading}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_list_of_pages_names_every_page_and_the_readme_eight() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs" / "README.md").read_text())
    every = {name_of(page) for page in pages()} - {"README.md", "docs/README.md"}
    assert every <= {f"docs/{target}" for target in linked}
    table = (ROOT / "README.md").read_text().partition("## Documentation")[2]
    shown = re.findall(r"^\| \[[^]]+\]\((docs/[^)#]+)\) \|", table, re.M)
    assert len(shown) == 8
    assert shown[-1] == "docs/README.md"


def test_every_command_and_option_is_in_the_page_about_the_command_line() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    missing = []

    def walk(command: Any, path: tuple[str, ...]) -> None:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                walk(child, (*path, name))
            return
        name = " ".join(path)
        row = re.search(rf"^\| `{re.escape(name)}[` ].*$", text, re.M)
        if row is None:
            missing.append(name)
            return
        for parameter in command.params:
            long = [option for option in parameter.opts if option.startswith("--")]
            if (
                long
                and not getattr(parameter, "hidden", False)
                and not {"--json", "--help", "--url", "--key", "--key-file"} & set(long)
                and f"`{long[0]}" not in row[0]
            ):
                missing.append(f"{name} {long[0]}")

    for name in ENTRIES:
        walk(_loaded(name), (name,))
    assert not missing


def test_the_page_about_the_command_line_names_the_commands_without_json() -> None:
    without: set[str] = set()

    def walk(command: Any, path: tuple[str, ...]) -> None:
        for name, child in getattr(command, "commands", {}).items():
            walk(child, (*path, name))
        if not hasattr(command, "commands") and not any("--json" in each.opts for each in command.params):
            without.add(" ".join(path))

    for name in ENTRIES:
        walk(_loaded(name), (name,))
    (sentence,) = re.findall(r"^- No `--json`: (.*?)\.$", (ROOT / "docs" / "cli.md").read_text(), re.M | re.S)
    assert set(re.findall(r"`([a-z ]+)`", sentence)) == without


def test_every_limit_is_documented_with_its_answer() -> None:
    """The table of codes and fields in the page about accounts, against the errors that the API answers."""
    text = (ROOT / "docs" / "identities.md").read_text()
    found = {}
    for row in re.findall(r"^\| (`--.*`) \| `([A-Z_]+)` \| (.*) \|$", text, re.M):
        for option in re.findall(r"--([a-z-]+)", row[0]):
            found[option.replace("-", "_")] = (row[1], set(re.findall(r"`(\w+)`", row[2])))
    assert set(found) == {field.name for field in fields(Limits)}
    for name, (code, extras) in found.items():
        error: SteadError
        if name == "repos":
            error = RepoLimitExceeded("too many repositories")
        elif name in {"repo_mib", "total_repos_mib"}:
            error = QuotaExceeded("quota exceeded", 4, 3)
        else:
            error = LimitExceeded(LimitName(name), 4, 3, 2)
        answer = from_product(error)
        assert (answer.status, answer.code, set(answer.extras)) == (403, code, extras), name


@pytest.mark.parametrize("page", [*pages(), *ROOT.glob("[A-Z]*.md")], ids=name_of)
def test_every_row_of_a_table_has_the_cells_of_its_header(page: Path) -> None:
    text = re.sub(
        r"^ *```.*?^ *```$", lambda found: "\n" * found[0].count("\n"), page.read_text(), flags=re.S | re.M
    )
    cells: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("|"):
            cells = None
            continue
        found = len(re.findall(r"(?<!\\)\|", line)) - 1
        cells = found if cells is None else cells
        assert found == cells, f"{name_of(page)}:{number} has {found} cells, its table {cells}: {line}"


def test_every_setting_is_documented() -> None:
    limits = [f"limit_{field.name}" for field in fields(Limits)]
    names = {f"STEAD_{name}".upper() for name in {*Settings.model_fields, *limits, "config"} - {"limit"}}
    text = (ROOT / "docs" / "install.md").read_text() + (ROOT / "docs" / "server.md").read_text()
    documented = set(re.findall(r"^\| `(STEAD_\w+)`", text, re.M))
    assert names == documented
    (file,) = [block for block in blocks(ROOT / "docs" / "install.md") if block.language == "toml"]
    Settings(**tomllib.loads(file.body))


def test_commands_in_the_page_about_the_command_line_exist() -> None:
    known: set[str] = set()

    def walk(command: Any, path: tuple[str, ...]) -> None:
        known.add(" ".join(path))
        for name, child in getattr(command, "commands", {}).items():
            walk(child, (*path, name))

    for name in ENTRIES:
        walk(_loaded(name), (name,))
    documented = set(re.findall(r"^\| `([a-z][a-z -]*)` \|", (ROOT / "docs" / "cli.md").read_text(), re.M))
    assert documented <= known


def test_the_systemd_unit_starts_a_command_that_exists() -> None:
    page = ROOT / "docs" / "operate.md"
    (unit,) = [block for block in blocks(page) if block.language == "ini"]
    lines = [line.partition("=")[::2] for line in unit.body.splitlines() if "=" in line]
    (command,) = [value for key, value in lines if key == "ExecStart"]
    program, *words = command.split()
    assert program.endswith("/.venv/bin/stead")
    _check_words(words, command)
    environment = dict(value.split("=", 1) for key, value in lines if key == "Environment")
    assert Settings(listen=environment["STEAD_LISTEN"]).address
    assert {name.removeprefix("STEAD_").lower() for name in environment} <= {*Settings.model_fields}
    assert ("KillMode", "process") in lines  # the default would end the VMs with the server


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if Path(str(page.id)).stem not in ABOUT_ONE_INTERFACE and "internals" not in Path(str(page.id)).parts
    ],
)
def test_a_page_about_a_topic_has_all_three_interfaces(page: Path) -> None:
    found = blocks(page)
    shell = "\n".join(block.body for block in found if block.language == "console")
    assert any(block.language == "python" for block in found)
    assert "stead " in shell
    assert "curl " in shell or any(block.mark == "body" for block in found)
