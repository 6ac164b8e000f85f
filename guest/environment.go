package main

import (
	"io"
	"os"
	"strings"
)

// environmentLimit bounds each file: more would not fit into a command's environment either.
const environmentLimit = 128 << 10

// environmentFiles are read by every login, in this order.
var environmentFiles = [...]string{"/etc/environment", "/etc/default/locale"}

// variable is one line of such a file; without an equals sign it unsets the variable.
type variable struct {
	name, value string
	unset       bool
}

// environment returns the variables of every command of an account (nil is root): what a login sets, then
// /etc/environment and /etc/default/locale as pam_env reads them, then what the caller gave.
func (a *accounts) environment(actor *user, given map[string]string) map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refresh()
	account := actor
	if account == nil {
		account = a.users[a.byUID[0]]
	}
	if account == nil {
		account = &user{name: "root", home: "/root", shell: "/bin/sh"}
	}
	all := map[string]string{
		"LANG": "C.UTF-8",
		"PATH": account.home + "/.local/bin:" + defaultPath,
	}
	for _, each := range a.variables {
		if each.unset {
			delete(all, each.name)
		} else {
			all[each.name] = each.value
		}
	}
	// These follow the account: one file for all accounts cannot say them.
	all["HOME"], all["USER"], all["LOGNAME"], all["SHELL"] = account.home, account.name, account.name, account.shell
	for name, value := range given {
		all[name] = value
	}
	return all
}

// readEnvironments parses all files, unless none of them changed.
func (a *accounts) readEnvironments() {
	var versions [len(environmentFiles)]fileVersion
	for i, path := range environmentFiles {
		versions[i] = versionOf(a.root + path)
	}
	if versions == a.environmentVersions {
		return
	}
	a.environmentVersions, a.variables = versions, nil
	for _, path := range environmentFiles {
		a.variables = append(a.variables, readEnvironment(a.root+path)...)
	}
}

// readEnvironment parses a file of pam_env's syntax: NAME=value lines, an optional `export`, comments from `#`
// to the end of the line, and quotes around a whole value. Lines that do not parse are skipped.
func readEnvironment(path string) []variable {
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, environmentLimit))
	if err != nil {
		return nil
	}
	var found []variable
	for line := range strings.Lines(string(content)) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), "#")
		line = strings.TrimPrefix(line, "export ")
		name, value, assigned := strings.Cut(line, "=")
		if !isVariableName(name) || strings.IndexByte(value, 0) >= 0 {
			continue
		}
		found = append(found, variable{name, unquote(value), !assigned})
	}
	return found
}

func isVariableName(name string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
	return name != "" && strings.Trim(name, letters) == ""
}

// unquote removes a leading quote and, with it, a trailing one; pam_env knows no escapes.
func unquote(value string) string {
	const quotes = `"'`
	if value == "" || strings.IndexByte(quotes, value[0]) < 0 {
		return value
	}
	value = value[1:]
	if value != "" && strings.IndexByte(quotes, value[len(value)-1]) >= 0 {
		value = value[:len(value)-1]
	}
	return value
}
