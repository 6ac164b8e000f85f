package main

const (
	logLimit   = 1 << 20
	logSegment = 32 << 10
	// What a segment costs beside its bytes: a program may change the stream with every byte.
	segmentCost = 64
)

// outputLog holds the last output of a process, both streams in the order they came.
type outputLog struct {
	segments []logged // oldest first
	start    int64    // offset of the first byte held
	size     int      // bytes that the segments cost
}

type logged struct {
	kind byte
	data []byte
}

func (l *outputLog) append(kind byte, data []byte) {
	for len(data) > 0 {
		last := len(l.segments) - 1
		if last < 0 || l.segments[last].kind != kind || len(l.segments[last].data) >= logSegment {
			l.segments = append(l.segments, logged{kind: kind})
			l.size += segmentCost
			last++
		}
		segment := &l.segments[last]
		before := cap(segment.data)
		take := min(len(data), logSegment-len(segment.data))
		segment.data = append(segment.data, data[:take]...)
		l.size += cap(segment.data) - before
		data = data[take:]
	}
	l.trim(l.size - logLimit)
}

// trim drops the oldest segments until at least this many bytes are free, or only the newest segment is left.
func (l *outputLog) trim(bytes int) {
	dropped := 0
	for ; bytes > 0 && dropped < len(l.segments)-1; dropped++ {
		oldest := &l.segments[dropped]
		cost := cap(oldest.data) + segmentCost
		l.start += int64(len(oldest.data))
		l.size -= cost
		bytes -= cost
		*oldest = logged{}
	}
	l.segments = l.segments[dropped:]
}

// read appends frames of what was printed from an offset on, up to a number of bytes; it returns the offset
// after them. The offset is one that is held, or the end.
func (l *outputLog) read(to []byte, offset int64, limit int) ([]byte, int64) {
	at := l.start
	for _, segment := range l.segments {
		end := at + int64(len(segment.data))
		if offset < end && limit > 0 {
			data := segment.data[offset-at:]
			data = data[:min(len(data), limit)]
			to = appendFrame(to, segment.kind, data)
			offset += int64(len(data))
			limit -= len(data)
		}
		at = end
	}
	return to, offset
}
