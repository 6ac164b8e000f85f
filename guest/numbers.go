package main

// System calls and flags of linux/amd64 that the syscall package does not name.
const (
	sysSetns     = 308
	sysRenameat2 = 316
	sysGetrandom = 318

	oPath           = 0x200000
	atCurrent       = -0x64 // AT_FDCWD
	atNoFollow      = 0x100 // AT_SYMLINK_NOFOLLOW
	renameNoReplace = 1
	addEntropy      = 0x40085203 // RNDADDENTROPY
	reseedRandom    = 0x5207     // RNDRESEEDCRNG
	clockRealtime   = 0
	utimeOmit       = 1<<30 - 2
)
