"""All fuzz targets by name."""

from support.fuzzing import agents, bodies, disks, gateway, http, names, repositories

TARGETS = {
    target.name: target
    for target in (
        agents.ANSWERS,
        agents.FRAMES,
        agents.JSON,
        repositories.PUSHES,
        repositories.TARS,
        repositories.ZIPS,
        http.CALLS,
        bodies.VALUES,
        names.QUERIES,
        names.LOOKUPS,
        names.HOSTS,
        names.USER_NAMES,
        gateway.MESSAGES,
        disks.HEADERS,
    )
}
