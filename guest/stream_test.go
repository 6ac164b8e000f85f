package main

import (
	"syscall"
	"testing"
	"time"
)

func flood(p *pace, took time.Duration) {
	p.wait(80)
	p.since = p.since.Add(-took)
	p.wait(floodBytes - 80)
}

func TestTerminalsAreReadAtIntervalsOnlyWhileOutputFloods(t *testing.T) {
	p := pace{}
	for range floodBytes/80 - 1 {
		p.wait(80)
	}
	if p.interval != 0 || p.waitsLonger() {
		t.Errorf("waits before the flood: %+v", p)
	}
	p.since = p.since.Add(-2 * floodTime)
	p.wait(80)
	p.wait(80)
	if p.interval == 0 || !p.waitsLonger() {
		t.Errorf("does not wait: %+v", p)
	}
	for range 20 {
		p.wait(0)
	}
	if p.interval != maxInterval || p.waitsLonger() {
		t.Errorf("waits without end: %+v", p)
	}
	p.wait(ttyBuffer * 3 / 4)
	if p.interval != maxInterval {
		t.Errorf("an interval that suits the program was changed: %+v", p)
	}
	for range 5 {
		p.wait(ttyBuffer)
	}
	if p.interval >= minInterval {
		t.Errorf("waits although the buffer is full each time: %+v", p)
	}
	p.end()
	if p != (pace{}) || floods.Load() != 0 {
		t.Errorf("the flood is not over: %+v, %d floods", p, floods.Load())
	}
}

func TestAFastFloodIsReadWithoutIntervals(t *testing.T) {
	p := pace{}
	defer p.end()
	for range 3 {
		flood(&p, 0)
		if p.wait(80); p.waitsLonger() || p.interval != 0 {
			t.Fatalf("waits: %+v", p)
		}
	}
	p.printed = 0
	flood(&p, 2*floodTime)
	if p.wait(80); !p.slow || p.interval == 0 {
		t.Errorf("does not wait when the program has become slow: %+v", p)
	}
}

func TestSeveralFloodsAreReadWithoutIntervals(t *testing.T) {
	one, other := pace{}, pace{}
	flood(&one, 2*floodTime)
	flood(&other, 2*floodTime)
	for range 3 {
		one.wait(0)
	}
	if one.waitsLonger() || other.waitsLonger() {
		t.Error("waits beside another flood")
	}
	other.end()
	if !one.waitsLonger() {
		t.Errorf("does not wait after the other flood: %+v", one)
	}
	one.end()
}

func TestOneReadOfATerminalReturnsAtMostItsBuffer(t *testing.T) {
	master, slave, err := openPty(80, 24, nil)
	must(t, err)
	defer syscall.Close(master)
	defer syscall.Close(slave)
	go func() {
		for range 3 {
			syscall.Write(slave, make([]byte, ttyBuffer-1)) // no line ends: as many bytes are read
		}
	}()
	buffer := make([]byte, 4*ttyBuffer)
	most := 0
	for total := 0; total < 3*(ttyBuffer-1); {
		n, err := nonblocking(syscall.SYS_READ, master, buffer)
		if err == syscall.EAGAIN {
			time.Sleep(10 * time.Millisecond) // the kernel's worker fills the buffer meanwhile
			continue
		}
		must(t, err)
		total += n
		most = max(most, n)
	}
	if most != ttyBuffer {
		t.Errorf("a read returned %d bytes", most)
	}
}
