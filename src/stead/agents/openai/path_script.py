"""The shell program that checks a path inside the VM and runs one file operation on it, in one call.

Every symbolic link is resolved in the VM: `cd -P` enters each folder, and the operation uses the last part of
the path relative to the folder that was entered and checked. An operation whose real path is outside the
workspace and the granted paths is refused. Only shell built-ins are used until the operation itself starts.
"""

from collections.abc import Sequence
from enum import IntEnum
from pathlib import PurePosixPath


class Refusal(IntEnum):
    """Exit codes of the program; others are those of the command that it ran."""

    ESCAPE = 111
    NOT_FOUND = 112
    BAD_GRANT = 113
    READ_ONLY = 114
    ESCAPE_OF_TARGET = 115
    """The second path of an operation on two."""
    EXISTS = 117
    NOT_A_FILE = 118
    DENIED = 119


def path_command(
    operation: str,
    path: PurePosixPath,
    argument: str = "",
    *,
    root: PurePosixPath,
    grants: Sequence[tuple[PurePosixPath, bool]] = (),
) -> list[str]:
    """The command for an operation on a path; `grants` are further allowed paths, True if read-only."""
    pairs = [part for grant, read_only in grants for part in (grant.as_posix(), "1" if read_only else "0")]
    return ["sh", "-c", _SCRIPT, "sh", operation, root.as_posix(), path.as_posix(), argument, *pairs]


_SCRIPT = r"""
set -f
unset CDPATH
LC_ALL=C
export LC_ALL
operation=$1 root=$2 path=$3 argument=$4
shift 4
create= follow=1 writes= escape=111

fail() {
    printf '%s\n' "$2" >&2
    exit "$1"
}

# real_folder FOLDER: its path without symbolic links, and a dot that keeps a last newline
real_folder() (
    cd -P -- "$1" 2>/dev/null && printf '%s.' "$PWD"
)

# check PATH GRANTS...: fails unless PATH, which has no symbolic links, may be used
check() {
    place=$1
    shift
    case "$place/" in "$base"/*) return 0 ;; esac
    longest=0 read_only=0
    while [ "$#" -gt 1 ]; do
        granted=$(real_folder "$1" || { readlink -fn -- "$1" && printf .; })
        granted=${granted%.}
        [ "$granted" != / ] || fail 113 "extra path grant must not resolve to filesystem root: $1"
        if [ -n "$granted" ] && [ "${#granted}" -gt "$longest" ]; then
            case "$place/" in "$granted"/*) longest=${#granted} read_only=$2 ;; esac
        fi
        shift 2
    done
    [ "$longest" -gt 0 ] || fail "$escape" "$place"
    [ -z "$writes" ] || [ "$read_only" = 0 ] || fail 114 "$place"
}

# enter FOLDER GRANTS...: goes there, and makes missing folders if $create is 1. If it is "later", what is
# missing stays in $missing.
enter() {
    missing=
    cd -P -- "$1" 2>/dev/null && return 0
    cd -P / || exit 1
    rest=${1#/}
    shift
    while [ -n "$rest" ]; do
        part=${rest%%/*}
        case "$rest" in */*) rest=${rest#*/} ;; *) rest= ;; esac
        [ -n "$part" ] || continue
        cd -P -- "./$part" 2>/dev/null && continue
        # What exists outside is not told either.
        check "${PWD%/}/$part" "$@"
        if [ -e "./$part" ] || [ -L "./$part" ]; then
            [ -d "./$part" ] && fail 119 "permission denied: ${PWD%/}/$part"
            fail 112 "not a folder: ${PWD%/}/$part"
        fi
        case "$create" in
        1)
            mkdir -- "./$part" || [ -d "./$part" ] || exit 1
            cd -P -- "./$part" || exit 1
            ;;
        later)
            missing=$part${rest:+/$rest}/
            return 0
            ;;
        *) fail 112 "no such folder: ${PWD%/}/$part" ;;
        esac
    done
}

# locate PATH GRANTS...: enters the folder of PATH, sets $leaf to the last part, and checks both
locate() {
    folder=${1%/*} leaf=${1##*/}
    shift
    enter "${folder:-/}" "$@"
    links=0
    while [ -n "$follow" ] && [ -z "$missing" ] && [ -L "./$leaf" ]; do
        links=$((links + 1))
        [ "$links" -le 40 ] || fail 112 "too many symbolic links: $path"
        target=$(readlink -n -- "./$leaf" && printf .) || exit 1
        target=${target%.}
        case "$target" in /*) ;; *) target=${PWD%/}/$target ;; esac
        if whole=$(real_folder "$target"); then target=${whole%.}; fi
        [ "$target" != / ] || check / "$@"
        folder=${target%/*} leaf=${target##*/}
        case "$leaf" in '' | . | ..) fail 112 "broken symbolic link: $path" ;; esac
        enter "${folder:-/}" "$@"
    done
    check "${PWD%/}/$missing$leaf" "$@"
}

regular() {
    [ -e "./$leaf" ] || fail 112 "no such file: $path"
    [ -f "./$leaf" ] || fail 118 "not a regular file: $path"
}

if cd -P -- "$root" 2>/dev/null; then
    base=${PWD%/}
else
    case "$operation" in
    write | create | mkdir | prepare)
        mkdir -p -- "$root" && cd -P -- "$root" || exit 1
        base=${PWD%/}
        ;;
    check) exit 0 ;;
    *) fail 112 "workspace root not found: $root" ;;
    esac
fi

case "$operation" in
check)
    create=later writes=$argument
    locate "$path" "$@"
    ;;
read)
    locate "$path" "$@"
    regular
    exec cat -- "./$leaf"
    ;;
range)
    locate "$path" "$@"
    regular
    tail -c "+${argument%:*}" -- "./$leaf" | head -c "${argument#*:}"
    ;;
write | prepare)
    create=1 writes=1
    locate "$path" "$@"
    part=./.stead-$$-$argument
    if [ -e "./$leaf" ]; then
        regular
        [ -w "./$leaf" ] || fail 119 "permission denied: $path"
    fi
    if [ "$operation" = prepare ]; then
        printf '%s' "${PWD%/}/$leaf"
        exit 0
    fi
    # Not `:`, with which a failed redirection ends the shell.
    if { true >"$part"; } 2>/dev/null; then
        trap 'rm -f -- "$part"' EXIT
        cat >"$part" || exit 1
        if [ -e "./$leaf" ]; then
            # Only root can change the owner. `cp --attributes-only` opens the file, which buckets refuse.
            chown --reference="./$leaf" -- "$part" 2>/dev/null || [ "$(id -u)" != 0 ] || exit 1
            chmod --reference="./$leaf" -- "$part" || exit 1
        fi
        mv -fT -- "$part" "./$leaf" || exit 1
        trap - EXIT
    else
        [ -e "./$leaf" ] || fail 119 "permission denied: $PWD"
        cat >"./$leaf"
    fi
    ;;
create)
    create=1 writes=1 follow=
    locate "$path" "$@"
    if [ -L "./$leaf" ]; then
        # A link that leads out of the workspace is an escape, whatever is at its end.
        create=later follow=1
        locate "$path" "$@"
        fail 117 "$path exists"
    fi
    [ ! -e "./$leaf" ] || fail 117 "$path exists"
    part=./.stead-$$-$argument
    { true >"$part"; } 2>/dev/null || fail 119 "permission denied: $PWD"
    trap 'rm -f -- "$part"' EXIT
    cat >"$part" || exit 1
    ln -T -- "$part" "./$leaf" 2>/dev/null || {
        # A mounted bucket has no hard links: the file is made first, if there is none, and filled then.
        set -C
        { true >"./$leaf"; } 2>/dev/null || {
            if [ -e "./$leaf" ] || [ -L "./$leaf" ]; then fail 117 "$path exists"; fi
            fail 1 "cannot create $path"
        }
        set +C
        cat -- "$part" >"./$leaf" || {
            rm -f -- "./$leaf"
            exit 1
        }
    }
    ;;
mkdir)
    writes=1
    if [ "$argument" = 1 ]; then
        create=1
        enter "$path" "$@"
        check "$PWD" "$@"
    else
        locate "$path" "$@"
        exec mkdir -- "./$leaf"
    fi
    ;;
rm)
    writes=1 follow=
    if [ "$argument" = 1 ]; then create=later; fi
    locate "$path" "$@"
    [ -z "$missing" ] || exit 0
    [ "$argument" = 1 ] || exec rm -- "./$leaf"
    if [ ! -L "./$leaf" ]; then
        place=${PWD%/}/$leaf
        while [ "$#" -gt 1 ]; do
            granted=$(real_folder "$1")
            [ "$2" = 0 ] || case "${granted%.}/" in
            "$base"/*) ;;
            "$place"/*) fail 114 "${granted%.}" ;;
            esac
            shift 2
        done
    fi
    exec rm -rf -- "./$leaf"
    ;;
mv)
    writes=1 follow=
    locate "$path" "$@"
    [ -L "./$leaf" ] || [ -f "./$leaf" ] || fail 1 "not a regular file or symbolic link: $path"
    source=${PWD%/}/$leaf escape=115
    locate "$argument" "$@"
    exec mv -fT -- "$source" "./$leaf"
    ;;
same | same-entry)
    follow= create=later
    locate "$path" "$@"
    left=${PWD%/}/$missing$leaf escape=115
    locate "$argument" "$@"
    # For the caller: the folder of the second path exists.
    [ -n "$missing" ] || printf found
    right=${PWD%/}/$missing$leaf
    if [ "$operation" = same-entry ] && { [ -L "$left" ] || [ -L "$right" ]; }; then exit 1; fi
    [ "$left" -ef "$right" ]
    ;;
ls)
    locate "$path" "$@"
    [ -e "./$leaf" ] || fail 112 "no such file or folder: $path"
    if [ -d "./$leaf" ]; then
        cd -P -- "./$leaf" || exit 1
        exec find . -mindepth 1 -maxdepth 1 -printf '%y\t%m\t%u\t%g\t%s\t%f\0'
    fi
    exec find "./$leaf" -maxdepth 0 -printf '%y\t%m\t%u\t%g\t%s\t\0'
    ;;
*) fail 64 "unknown operation: $operation" ;;
esac
"""
