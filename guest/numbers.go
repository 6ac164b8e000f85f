package main

// System calls and flags of linux/amd64 that the syscall package does not name.
const (
	sysOpenByHandleAt = 304
	sysSetns          = 308
	sysRenameat2      = 316
	sysGetrandom      = 318
	sysFaccessat2     = 439

	oPath           = 0x200000
	atCurrent       = -0x64 // AT_FDCWD
	atNoFollow      = 0x100 // AT_SYMLINK_NOFOLLOW
	atEffective     = 0x200 // AT_EACCESS
	renameNoReplace = 1
	addEntropy      = 0x40085203 // RNDADDENTROPY
	reseedRandom    = 0x5207     // RNDRESEEDCRNG
	clockRealtime   = 0
	utimeOmit       = 1<<30 - 2
	pollHungUp      = 0x2000     // POLLRDHUP
	inputUTF8       = 0x4000     // IUTF8
	unlockPty       = 0x40045431 // TIOCSPTLCK
	openPtyPeer     = 0x5441     // TIOCGPTPEER
	signalPty       = 0x40045436 // TIOCSIG
	flushPty        = 0x540b     // TCFLSH
)
