"""Plans: which layers of a request become snapshots, and what is applied to the VM itself."""

from dataclasses import dataclass, replace

from stead.builds.dockerfile import commands_of
from stead.builds.errors import InvalidSpec
from stead.builds.spec import LEAF_FIELDS, Layer, Port, bare, chain, combine
from stead.builds.validation import DEFAULT_PORT, check, conflict
from stead.machines.start import READY_TIMEOUT
from stead.machines.unchanged import UNCHANGED, Unchanged
from stead.settings import Size

_NO_SNAPSHOT = "persistence of a layer ignored: no snapshot is built, because no layer changes anything"


@dataclass(frozen=True)
class Base:
    """The base of the innermost layer, a snapshot or the base image, and the size that the request gives."""

    snapshot: str | None = None
    vcpus: int | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None

    def size(self, default: Size) -> Size:
        memory = default.memory_mib if self.memory_gb is None else int(self.memory_gb * 1024)
        disk = default.disk_gib if self.disk_gb is None else int(self.disk_gb)
        return Size(self.vcpus or default.vcpus, memory, disk)


@dataclass(frozen=True)
class Plan:
    """Layers that become snapshots, innermost first, and what is applied to the VM itself (`own`)."""

    base: Base
    layers: tuple[Layer, ...]
    own: Layer
    workdir: str | None = None
    idle_timeout: int | Unchanged | None = UNCHANGED
    ports: tuple[Port, ...] | None = None
    wait_for_ready: bool | None = None
    ready_timeout: float | None = None

    @property
    def domain_port(self) -> int:
        """The port in the VM that domains lead to if they name none."""
        if self.ports is None:
            return DEFAULT_PORT.target_port
        return self.ports[0].target_port if self.ports else DEFAULT_PORT.port

    @property
    def builds_layers(self) -> bool:
        """Whether a layer changes something, so that a snapshot of it is needed."""
        return any(layer.work for layer in self.layers)

    @property
    def is_built(self) -> bool:
        """Whether something is set up; otherwise the VM is its base, a snapshot or the base image."""
        return self.builds_layers or bool(self.own.work)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines for the log, about parts of the plan that have no effect."""
        kept = any(layer.persistence is not None for layer in self.layers)
        return (_NO_SNAPSHOT,) if kept and not self.builds_layers else ()

    @property
    def ready_seconds(self) -> float | None:
        """Seconds to wait for the VM's services; None without a wait."""
        return (self.ready_timeout or READY_TIMEOUT) if self.wait_for_ready else None


def plan_machine(spec: Layer | None, template: Layer | None, top: Layer) -> Plan:
    """Plan a VM: all layers of a spec but the outermost become snapshots; of a template, all.

    `top` has the fields beside spec or template. They are applied to the VM itself, together with the
    outermost layer of the spec; its base and size count where spec or template have none.
    """
    if spec is not None and template is not None:
        raise conflict(0, "spec", "template")
    if top.snapshot is not None:
        raise InvalidSpec("invalid_value", "snapshot is allowed inside spec only")
    check(top)
    given = spec or template
    if given is None:
        given = spec = replace(Layer(), **{name: getattr(top, name) for name in LEAF_FIELDS})
    check(given)
    layers = chain(given)
    base = _base(layers[-1], top)
    built = [bare(layer) for layer in (layers[1:] if spec is not None else layers)]
    own = combine(bare(layers[0]), bare(top)) if spec is not None else bare(top)
    settings = combine(combine_all(built), own)
    return Plan(
        base,
        _with_image(layers[-1], built),
        own,
        workdir=settings.workdir,
        idle_timeout=settings.idle_timeout,
        ports=settings.ports,
        wait_for_ready=own.wait_for_ready,
        ready_timeout=own.ready_timeout,
    )


def plan_snapshot(layer: Layer) -> Plan:
    """Plan a snapshot: every layer is built."""
    check(layer)
    layers = chain(layer)
    return Plan(_base(layers[-1], Layer()), _with_image(layers[-1], [bare(each) for each in layers]), Layer())


def combine_all(layers: list[Layer]) -> Layer:
    """Combine layers, given outermost first, into one."""
    combined = Layer()
    for layer in reversed(layers):
        combined = combine(combined, layer)
    return combined


def _base(leaf: Layer, top: Layer) -> Base:
    if leaf.snapshot_id is not None and top.snapshot_id not in (None, leaf.snapshot_id):
        raise conflict(0, "snapshot_id", "spec.snapshot_id")
    if leaf.base_image is not None and top.snapshot_id is not None:
        raise conflict(0, "snapshot_id", "base_image")
    sized = any(value is not None for value in (leaf.vcpus, leaf.memory_gb, leaf.disk_gb))
    size = leaf if sized else top
    return Base(leaf.snapshot_id or top.snapshot_id, size.vcpus, size.memory_gb, size.disk_gb)


def _with_image(leaf: Layer, outermost_first: list[Layer]) -> tuple[Layer, ...]:
    """Innermost first, with the commands of a base image as a layer of their own below all others."""
    layers = tuple(reversed(outermost_first))
    commands = () if leaf.base_image is None else commands_of(leaf.base_image)
    if not commands:
        return layers
    image = Layer(commands=commands, discriminator=leaf.discriminator, skip_cache=leaf.skip_cache)
    return image, *layers
