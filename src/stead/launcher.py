"""The launcher: a process that gives up rights on request and then executes a program.

Landlock, seccomp and resource limits are set by the process that they bind, and a server with threads cannot
run Python between fork and exec. So this is Perl, which starts in a millisecond and can make system calls.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = r"""
my ($rules, $filter, $silence);

sub fail { print STDERR "launcher: $_[0]: $!\n"; exit 127 }

sub obey {
    my ($name, $value) = split(/=/, $_[0], 2);
    if ($name eq "clear") { %ENV = () }
    elsif ($name eq "env") { my ($key, $text) = split(/=/, $value, 2); $ENV{$key} = $text }
    elsif ($name eq "folder") { chdir($value) or fail("cannot enter $value") }
    elsif ($name eq "quiet") { open($silence, ">", "/dev/null") or fail("/dev/null") }
    elsif ($name eq "limit") {
        my ($which, $most) = split(/:/, $value);
        syscall(302, 0, $which + 0, pack("QQ", $most, $most), 0) == 0 or fail("cannot limit resource $which");
    }
    elsif ($name eq "landlock") {
        $rules = syscall(444, pack("Q", $value), 8, 0);
        $rules >= 0 or fail("cannot make a Landlock ruleset");
    }
    elsif ($name eq "allow") {
        my ($of_folders, $of_files, $path) = split(/:/, $value, 3);
        sysopen(my $opened, $path, 010000000) or return;
        my $rule = pack("Ql", -d $opened ? $of_folders : $of_files, fileno($opened));
        syscall(445, $rules, 1, $rule, 0) == 0 or fail("cannot allow $path by Landlock");
    }
    elsif ($name eq "seccomp") { $filter = pack("H*", $value) }
    else { $! = 22; fail("unknown option $name") }
}

sub order {
    my ($size, $digit, $order) = ("", "", "");
    while (sysread(STDIN, $digit, 1) && $digit ne "\n") { $size .= $digit }
    while (length($order) < $size) {
        sysread(STDIN, $order, $size - length($order), length($order)) or exit 1;
    }
    return split(/\0/, $order, -1);
}

obey(shift @ARGV) while @ARGV && $ARGV[0] ne "--";
if (!@ARGV) {
    @ARGV = order();
    obey(shift @ARGV) while @ARGV && $ARGV[0] ne "--";
}
shift @ARGV;
@ARGV or exit 1;
if (defined $rules) {
    syscall(157, 38, 1, 0, 0, 0) == 0 or fail("cannot set no_new_privs");
    syscall(446, $rules, 0) == 0 or fail("cannot restrict files by Landlock");
}
if (defined $filter) {
    syscall(157, 38, 1, 0, 0, 0) == 0 or fail("cannot set no_new_privs");
    my $program = pack("S x6 P", length($filter) / 8, $filter);
    syscall(157, 22, 2, $program, 0, 0) == 0 or fail("cannot install a seccomp filter");
}
open(STDERR, ">&", $silence) if $silence;
exec { $ARGV[0] } @ARGV;
fail("cannot run $ARGV[0]");
"""
_DATA, _FILE_SIZE = 2, 1
"""RLIMIT_DATA and RLIMIT_FSIZE, as `prlimit` numbers them."""

_COMMAND = ("perl", "-e", _PROGRAM, "folder=/")


def waiting(options: Sequence[str] = ()) -> list[str]:
    """The command line of a launcher that obeys these options, and then reads its order from standard input.

    What follows the order there is left unread.
    """
    return [*_COMMAND, *options]


@dataclass(frozen=True)
class Launch:
    """A program and how it is started."""

    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    """The whole environment of one that waits; None is that of the launcher, as it always is otherwise."""
    folder: Path = Path("/")
    quiet: bool = False
    """Whether its error output is discarded."""
    memory: int | None = None
    """Limit of its data segment, in bytes."""
    file: int | None = None
    """Limit of the size of a file, in bytes."""
    rules: Sequence[str] = ()
    """Of Landlock; see `FileAccess.rules`."""
    system_calls: bytes = b""
    """A seccomp filter, as BPF."""

    @property
    def arguments(self) -> list[str]:
        """The command line that does it at once, but for the environment: others can see command lines."""
        return [*_COMMAND, *self._options(), "--", *self.command]

    def order(self, obeyed: Collection[str] = ()) -> bytes:
        """What a waiting launcher reads to do it, without the options that it has obeyed already."""
        environment = [] if self.environment is None else ["clear"]
        environment += [f"env={name}={value}" for name, value in (self.environment or {}).items()]
        options = [option for option in self._options() if option not in obeyed]
        words = [os.fsencode(word) for word in (*environment, *options, "--", *self.command)]
        if any(b"\0" in word for word in words):
            raise ValueError("embedded null byte")
        order = b"\0".join(words)
        return b"%d\n%s" % (len(order), order)

    def _options(self) -> list[str]:
        limits = ((_DATA, self.memory), (_FILE_SIZE, self.file))
        return [
            f"folder={self.folder}",
            *(["quiet"] if self.quiet else []),
            *(f"limit={which}:{most}" for which, most in limits if most is not None),
            *self.rules,
            *([f"seccomp={self.system_calls.hex()}"] if self.system_calls else []),
        ]
