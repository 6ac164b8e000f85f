package main

import (
	"runtime/debug"
	"sync/atomic"
)

const (
	agentMemory  = 40 * mib // of an agent without sessions
	sessionsHeld = 64 * mib
	tuneStep     = 4 * mib
	cellBytes    = 64 // of a screen: two screens of cells
)

// sessionMemory bounds what all sessions hold together, and gives the garbage collector room for it: near its
// limit it would run all the time.
type sessionMemory struct {
	held  atomic.Int64
	tuned atomic.Int64
}

// balance takes from the largest session while all hold too much.
func (m *sessionMemory) balance(t *sessions) {
	m.tune()
	for range 16 {
		if m.held.Load() <= sessionsHeld {
			return
		}
		if largest := t.largest(); largest != nil {
			largest.trim()
		}
	}
}

func (t *sessions) largest() (found *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	most := int64(0)
	for _, each := range t.all {
		each.mu.Lock()
		if each.held > most {
			found, most = each, each.held
		}
		each.mu.Unlock()
	}
	return found
}

// tune moves the limit of the collector with what is held.
func (m *sessionMemory) tune() {
	held, before := m.held.Load(), m.tuned.Load()
	if held-before < tuneStep && before-held < tuneStep || !m.tuned.CompareAndSwap(before, held) {
		return
	}
	debug.SetMemoryLimit(agentMemory + held + held/2)
}
