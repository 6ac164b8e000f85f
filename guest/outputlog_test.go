package main

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

func TestLogHoldsTheNewestOutputOfBothStreams(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var log outputLog
	var all []byte
	for range 3000 {
		piece := make([]byte, random.IntN(1200))
		for i := range piece {
			piece[i] = byte(random.Uint32())
		}
		log.append(frameStdout+byte(random.IntN(2)), piece)
		all = append(all, piece...)
		if log.size > logLimit {
			t.Fatalf("%d bytes", log.size)
		}
	}
	if held := int64(len(all)) - log.start; held < logLimit/4 {
		t.Errorf("only %d bytes are held", held)
	}
	for range 100 {
		offset := log.start + random.Int64N(int64(len(all))-log.start)
		limit := random.IntN(5000)
		frames, next := log.read(nil, offset, limit)
		var got []byte
		for from := bytes.NewReader(frames); from.Len() > 0; {
			_, payload, err := readFrame(from)
			must(t, err)
			got = append(got, payload...)
		}
		if want := all[offset:min(offset+int64(limit), int64(len(all)))]; !bytes.Equal(got, want) || next != offset+int64(len(got)) {
			t.Fatalf("%d bytes from %d, not %d", len(got), offset, len(want))
		}
	}
	log = outputLog{}
	for i := range 1 << 18 { // a program that changes the stream with every byte
		log.append(frameStdout+byte(i%2), []byte{1})
	}
	if log.size > logLimit || len(log.segments) > logLimit/segmentCost {
		t.Errorf("%d bytes, %d segments", log.size, len(log.segments))
	}
}
