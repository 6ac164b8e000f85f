package main

import (
	"bytes"
	"encoding/json"
	"encoding/json/jsontext"
	jsonv2 "encoding/json/v2"
	"errors"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

// sameAsStandard decodes with both decoders: what ours accepts, encoding/json has to understand in the same way.
func sameAsStandard[T any](t *testing.T, data []byte) bool {
	t.Helper()
	var ours, theirs T
	if decodeJSON(data, any(&ours).(readable)) != nil {
		return false
	}
	err := jsonv2.Unmarshal(data, &theirs, jsontext.AllowInvalidUTF8(true))
	if errors.Is(err, jsontext.ErrDuplicateName) {
		return true
	}
	if err != nil {
		t.Fatalf("%q is accepted; encoding/json: %v", data, err)
	}
	clean(&ours)
	clean(&theirs)
	if !reflect.DeepEqual(ours, theirs) {
		t.Fatalf("%q is read as\n%+v, not as\n%+v", data, ours, theirs)
	}
	return true
}

// clean makes absent and empty equal, which no caller tells apart.
func clean(value any) {
	switch v := value.(type) {
	case *execRequest:
		v.Argv, v.StdinB64 = append([]string{}, v.Argv...), append([]byte{}, v.StdinB64...)
		if v.Env == nil {
			v.Env = map[string]string{}
		}
	case *identityRequest:
		if v.SSHHostKeys == nil {
			v.SSHHostKeys = map[string]string{}
		}
		if v.Network != nil {
			v.Network.DNS = append([]string{}, v.Network.DNS...)
		}
	}
}

var execSamples = []string{
	`{"argv":["/bin/sh","-c","echo \"\u00e9\ud83d\ude00\\ \/\b\f\n\r\t\""],"cwd":"/","env":{"K":"V","é":"😀"},"stdin":"none"}`,
	` { "argv" : [ ] , "env" : { } , "timeout_ms" : 12 , "stdin_b64" : "AAEC" , "terminal" : null } `,
	`{"unknown":{"a":[1,true,false,null,{"b":"c"}],"d":-5},"argv":["x"],"argv":["y","z"]}`,
	`{"cwd":"\ud800","terminal":"\ud800\ud800\udc00","encoding":"\udc00x"}`,
	`null`, `{}`,
}

var malformed = []string{
	``, ` `, `{`, `}`, `[]`, `"x"`, `5`, `{"argv"}`, `{"argv":}`, `{"argv":[}`, `{"argv":["a"`, `{"argv":["a",]}`, `{"argv":["a"]`,
	`{"argv":["a"]}x`, `{"argv":"a"}`, `{"argv":[1]}`, `{"cwd":5}`, `{"cwd":"a`, `{"cwd":"\`, `{"cwd":"\x"}`, `{"cwd":"\u12"}`,
	`{"cwd":"\uzzzz"}`, "{\"cwd\":\"\n\"}", "{\"cwd\":\"\xff\"}", `{"timeout_ms":"5"}`, `{"timeout_ms":05}`, `{"timeout_ms":-05}`,
	`{"timeout_ms":1.5}`, `{"timeout_ms":99999999999999999999}`, `{"timeout_ms":-}`, `{"stdin_b64":"*"}`, `{"x":tru}`, `{,}`, `{"a":1,}`,
	`{"x":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`, `{null:1}`,
}

func TestJSONIsReadAsByTheStandardLibrary(t *testing.T) {
	for _, text := range execSamples {
		if !sameAsStandard[execRequest](t, []byte(text)) {
			t.Errorf("%s is refused", text)
		}
	}
	identity, _ := json.Marshal(sampleIdentity())
	if !sameAsStandard[identityRequest](t, identity) {
		t.Errorf("%s is refused", identity)
	}
	for _, text := range malformed {
		if err := decodeJSON([]byte(text), &execRequest{}); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
}

func TestJSONIsWrittenForTheStandardLibrary(t *testing.T) {
	code, signal := 3, "SIGTERM"
	for _, value := range []writable{
		&execResult{}, &execResult{ExitCode: &code, TimedOut: true, DurationUs: 12}, &execResult{Signal: &signal, OOM: &oomEvent{Process: "<a>"}},
		&identityAnswer{Nonce: "00", SSHHostKeys: map[string]string{"a.pub": "ssh \"x\"\n\x00\\"}, TimeNs: 1 << 60}, &identityAnswer{},
		&remembered{"b", "m", "h", "i", sampleIdentity().Network}, &health{1, "v", "m", "b", 5, 7},
	} {
		written := value.appendTo(nil)
		back := reflect.New(reflect.TypeOf(value).Elem()).Interface()
		if err := json.Unmarshal(written, back); err != nil {
			t.Errorf("%s: %v", written, err)
			continue
		}
		wanted, _ := json.Marshal(value)
		got, _ := json.Marshal(back)
		if !bytes.Equal(bytes.ReplaceAll(got, []byte("{}"), []byte("null")), bytes.ReplaceAll(wanted, []byte("{}"), []byte("null"))) {
			t.Errorf("%s is %s, not %s", written, got, wanted)
		}
	}
}

func FuzzJSON(f *testing.F) {
	for _, text := range append(append([]string{}, execSamples...), malformed...) {
		f.Add([]byte(text))
	}
	identity, _ := json.Marshal(sampleIdentity())
	f.Add(identity)
	f.Fuzz(func(t *testing.T, data []byte) {
		sameAsStandard[execRequest](t, data)
		sameAsStandard[identityRequest](t, data)
		if text := string(data); utf8.ValidString(text) {
			r := &jsonReader{data: appendText(nil, text)}
			if got := r.text(); r.err != nil || got != text {
				t.Errorf("%q comes back as %q: %v", text, got, r.err)
			}
		}
	})
}
