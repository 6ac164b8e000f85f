package main

import (
	"os"
	"slices"
	"testing"
)

func TestAccountsFollowTheirFiles(t *testing.T) {
	root := t.TempDir()
	a := &accounts{root: root}
	if _, err := a.find("alice"); err == nil {
		t.Error("found in files that are not there")
	}
	if found, err := a.find("root"); found != nil || err != nil {
		t.Errorf("root needs no files: %v %v", found, err)
	}
	must(t, os.Mkdir(root+"/etc", 0o755))
	must(t, os.WriteFile(root+"/etc/passwd", []byte("broken\n# x\nalice:x:10:20:A:/h:/s\ntoor:x:0:0::/:/s\n77:x:11:21::/:/s\n"), 0o644))
	must(t, os.WriteFile(root+"/etc/group", []byte("g:x:20:alice\nh:x:30:bob,alice,\nbroken:x\n"), 0o644))
	found, err := a.find("alice")
	must(t, err)
	if found.uid != 10 || found.gid != 20 || !slices.Equal(found.groups, []uint32{20, 30}) {
		t.Errorf("%+v", found)
	}
	if again, _ := a.find("10"); again != found {
		t.Errorf("%+v", again)
	}
	if found, err := a.find("toor"); found != nil || err != nil {
		t.Errorf("%v %v", found, err)
	}
	// As in su and chown, a name comes before a number.
	if found, err := a.find("77"); err != nil || found.uid != 11 {
		t.Errorf("%v %v", found, err)
	}
	must(t, os.WriteFile(root+"/etc/group", []byte("h:x:31:alice\n"), 0o644))
	if found, _ := a.find("alice"); !slices.Equal(found.groups, []uint32{20, 31}) {
		t.Errorf("%+v", found)
	}
	if user, group := a.names()(10, 99); user != "alice" || group != "99" {
		t.Errorf("%s %s", user, group)
	}
}
