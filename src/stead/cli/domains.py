"""`stead domains`: verified domains, and host names that lead to VMs."""

from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.output import Json, ago, fail, note, print_facts, print_json, print_table
from stead.cli.references import VM_HELP, complete_vm

if TYPE_CHECKING:
    from stead.sdk import Domain, DomainMapping

app = typer.Typer(no_args_is_help=True, help="Domains: verify them, and map host names to ports of VMs.")

_PAGE = 1000

DomainArgument = Annotated[str, typer.Argument(metavar="DOMAIN", help="The domain.")]
Hostname = Annotated[
    str,
    typer.Argument(metavar="DOMAIN", help="A host name, or `*.` and a domain for all names below it."),
]


@app.command()
def verify(domain: DomainArgument, as_json: Json = False) -> None:
    """Start to verify a domain, and print the TXT record to add. It includes the domain's subdomains."""
    with connected() as stead:
        made = stead.domains.verifications.create(domain)
    if as_json:
        print_json(made)
        return
    print_facts(
        [
            ("domain", made.domain),
            ("verification", made.id),
            ("record", f"{made.record_name} TXT"),
            ("value", made.verification_code),
        ]
    )
    note(f"add the record at your DNS provider, then run: stead domains complete {made.domain}")


@app.command()
def complete(
    domain: Annotated[str | None, typer.Argument(metavar="[DOMAIN]", help="The domain.")] = None,
    verification_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The id of the verification, instead of the domain.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Complete a verification: the server looks up the TXT record."""
    if (domain is None) == (verification_id is None):
        fail("give either a domain or --verification-id", code="USAGE", exit_code=2)
    with connected() as stead:
        found = stead.domains.verifications.complete(domain, verification_id=verification_id)
    if as_json:
        print_json({"domain": found, "verified": True})
    else:
        typer.echo(f"verified {found}")


@app.command()
def verifications(as_json: Json = False) -> None:
    """List verifications that are not completed, with the content of their TXT records."""
    with connected() as stead:
        found = stead.domains.verifications.list()
    if as_json:
        print_json({"verifications": found})
        return
    rows = [(each.domain, each.id, each.verification_code, ago(each.created_at)) for each in found]
    print_table(("domain", "id", "value", "created"), rows, "no verifications")


@app.command()
def cancel(domain: DomainArgument, as_json: Json = False) -> None:
    """Cancel a verification that is not completed."""
    with connected() as stead:
        pending = stead.domains.verifications.list()
        found = [each for each in pending if each.domain == domain.lower().removesuffix(".")]
        if not found:
            fail(f"no pending verification of {domain}", code="VERIFICATION_NOT_FOUND")
        stead.domains.verifications.cancel(found[0].domain, found[0].verification_code)
    if as_json:
        print_json({"domain": found[0].domain, "cancelled": True})
    else:
        typer.echo(f"cancelled the verification of {found[0].domain}")


@app.command("list")
def list_domains(
    previews: Annotated[bool, typer.Option("--all", help="Include mapped names of preview zones.")] = False,
    as_json: Json = False,
) -> None:
    """List verified domains."""
    with connected() as stead:
        found: list[Domain] = []
        while page := stead.domains.list(limit=_PAGE, offset=len(found), include_previews=previews):
            found += page
    if as_json:
        print_json({"domains": found})
        return
    rows = [
        (each.domain, "preview zone" if each.implicitly_owned else "DNS", ago(each.created_at))
        for each in found
    ]
    print_table(("domain", "verified by", "created"), rows, "no domains")


@app.command()
def release(domain: DomainArgument, as_json: Json = False) -> None:
    """Give up a verified domain, so that another account can verify it. Unmap its names first."""
    with connected() as stead:
        stead.domains.release(domain)
    if as_json:
        print_json({"domain": domain, "released": True})
    else:
        typer.echo(f"released {domain}")


@app.command("map")
def map_domain(
    domain: Hostname,
    vm: Annotated[str, typer.Argument(metavar="VM", help=VM_HELP, autocompletion=complete_vm)],
    port: Annotated[int, typer.Argument(metavar="PORT", min=1, max=65535, help="The port in the VM.")],
    as_json: Json = False,
) -> None:
    """Map a host name to a port of a VM. A name that is mapped moves to the VM at once."""
    with connected() as stead:
        made = stead.domains.mappings.create(domain, vm=vm, port=port)
    if as_json:
        print_json(made)
    else:
        typer.echo(f"{made.domain} leads to port {made.vm_port} of {made.vm_id}")


@app.command()
def unmap(domain: Hostname, as_json: Json = False) -> None:
    """Remove the mapping of a host name. Its domain stays verified."""
    with connected() as stead:
        stead.domains.mappings.delete(domain)
    if as_json:
        print_json({"domain": domain, "unmapped": True})
    else:
        typer.echo(f"unmapped {domain}")


@app.command("mappings")
def list_mappings(
    domain: Annotated[str | None, typer.Option(metavar="DOMAIN", help="Only this host name.")] = None,
    as_json: Json = False,
) -> None:
    """List host names and the VMs that they lead to."""
    with connected() as stead:
        found: list[DomainMapping] = []
        while page := stead.domains.mappings.list(domain=domain, limit=_PAGE, offset=len(found)):
            found += page
    if as_json:
        print_json({"mappings": found})
        return
    rows = [(each.domain, each.vm_id, each.vm_port, ago(each.created_at)) for each in found]
    print_table(("domain", "VM", "port", "created"), rows, "no mappings")
