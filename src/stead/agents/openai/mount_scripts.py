"""The shell programs that detach and check mounts inside the VM."""

from enum import IntEnum


class Lack(IntEnum):
    """Exit codes of the programs; others are those of the command that they ran."""

    MISSING = 41
    NOT_EMPTY = 42
    NOT_MOUNTED = 43


DETACH = r"""
cd /
root=$1 folders=$2
shift 2
for path; do
    tries=0
    # A mount that is in use, or whose program has died, is detached too.
    while [ "$tries" -lt 8 ] && { umount -- "$path" || umount -l -- "$path"; } 2>/dev/null; do
        tries=$((tries + 1))
    done
done
# programs SIGNAL PATHS...: signals the programs of mounts; fails if there are none
programs() {
    signal=$1 found=1
    shift
    for path; do
        escaped=$(printf '%s' "$path" | sed 's/[][\\.*^$+?(){}|]/\\&/g')
        name='^([^ ]*/)?(rclone mount|blobfuse2 mount|mount-s3) .*'
        pkill "-$signal" -f -- "$name $escaped( --|\$)" && found=0
    done
    return "$found"
}
tries=0 next=TERM
while programs "$next" "$@"; do
    tries=$((tries + 1)) next=0
    if [ "$tries" -gt 50 ]; then next=KILL; fi
    [ "$tries" -lt 100 ] || exit 1
    sleep 0.1
done
for folder in $folders; do
    rm -rf -- "$root/$folder" || exit 1
done
"""
"""ROOT FOLDERS PATHS...: unmount the paths, end their programs, and delete folders of the workspace."""

NEEDS = r"""
path=$1 empty=$2
shift 2
for need; do
    case "$need" in
    /*) [ -e "$need" ] ;;
    'rclone serve nfs') rclone serve nfs --help >/dev/null 2>&1 ;;
    *) command -v "$need" >/dev/null ;;
    esac || { printf '%s' "$need" && exit 41; }
done
[ -z "$empty" ] || [ -z "$(ls -A -- "$path" 2>/dev/null)" ] || exit 42
"""
"""PATH EMPTY NEEDS...: check that programs and devices exist; if EMPTY is set, that the folder is empty."""

LIST = r"""
said=$(timeout 90 rclone lsf --max-depth 1 --retries 1 --low-level-retries 2 --contimeout 20s \
    --config "$3" -- "$2" 2>&1 >/dev/null)
code=$?
printf '%s' "$said" | tail -c 4000
[ "$code" = 0 ] || exit "$code"
mountpoint -q -- "$1" || exit 43
"""
"""PATH REMOTE CONFIGURATION: list a remote of rclone, and check that something is mounted at the path."""
