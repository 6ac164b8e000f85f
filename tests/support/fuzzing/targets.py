"""All fuzz targets by name."""

from support.fuzzing import agents, http, names, repositories

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
        names.QUERIES,
        names.LOOKUPS,
        names.USER_NAMES,
    )
}
