package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"syscall"
)

// apiError is a failure as the host sees it.
type apiError struct {
	Status  int    `json:"-"`
	Code    string `json:"code"`
	Message string `json:"message"`
	Limit   int    `json:"limit,omitempty"`
}

func (e *apiError) Error() string { return e.Code + ": " + e.Message }

var statusOf = map[string]int{
	"invalid_request":   http.StatusBadRequest,
	"permission_denied": http.StatusForbidden,
	"not_found":         http.StatusNotFound,
	"user_not_found":    http.StatusNotFound,
	"exists":            http.StatusConflict,
	"not_empty":         http.StatusConflict,
	"is_directory":      http.StatusConflict,
	"not_directory":     http.StatusConflict,
	"busy":              http.StatusConflict,
	"no_space":          http.StatusInsufficientStorage,
	"out_of_range":      http.StatusRequestedRangeNotSatisfiable,
	"session_cap":       http.StatusTooManyRequests,
	"internal":          http.StatusInternalServerError,

	"connection_refused": http.StatusBadGateway,
}

var codeOf = map[syscall.Errno]string{
	syscall.ENOENT:       "not_found",
	syscall.EACCES:       "permission_denied",
	syscall.EPERM:        "permission_denied",
	syscall.EROFS:        "permission_denied",
	syscall.EEXIST:       "exists",
	syscall.ENOTEMPTY:    "not_empty",
	syscall.EISDIR:       "is_directory",
	syscall.ENOTDIR:      "not_directory",
	syscall.ENOSPC:       "no_space",
	syscall.EDQUOT:       "no_space",
	syscall.EBUSY:        "busy",
	syscall.ETXTBSY:      "busy",
	syscall.EINVAL:       "invalid_request",
	syscall.ENAMETOOLONG: "invalid_request",
	syscall.ELOOP:        "invalid_request",
	syscall.E2BIG:        "invalid_request",
	syscall.ENOEXEC:      "invalid_request",
	syscall.EFBIG:        "invalid_request",
	syscall.ENXIO:        "invalid_request",
}

func fail(code, format string, arguments ...any) *apiError {
	return &apiError{Status: statusOf[code], Code: code, Message: fmt.Sprintf(format, arguments...)}
}

func invalid(format string, arguments ...any) *apiError {
	return fail("invalid_request", format, arguments...)
}

// overloaded says that the VM has not enough of something now.
func overloaded(format string, arguments ...any) *apiError {
	failure := fail("busy", format, arguments...)
	failure.Status = http.StatusServiceUnavailable
	return failure
}

// pathFailure names the path in a system call's error.
func pathFailure(path string, err error) error {
	if err == nil {
		return nil
	}
	if known := (*apiError)(nil); errors.As(err, &known) {
		return known
	}
	var number syscall.Errno
	if errors.As(err, &number) {
		return fail(codeOfErrno(number), "%s: %s", printable(path), number.Error())
	}
	return fmt.Errorf("%s: %w", printable(path), err)
}

func codeOfErrno(number syscall.Errno) string {
	if code, known := codeOf[number]; known {
		return code
	}
	return "internal"
}

func asAPIError(err error) *apiError {
	if known := (*apiError)(nil); errors.As(err, &known) {
		return known
	}
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return invalid("request body over %d bytes", tooLarge.Limit)
	}
	var number syscall.Errno
	if errors.As(err, &number) {
		return fail(codeOfErrno(number), "%s", err)
	}
	return fail("internal", "%s", err)
}

func writeError(w http.ResponseWriter, err error) {
	failure := asAPIError(err)
	writeJSON(w, failure.Status, failure)
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"code":"internal","message":"unencodable answer"}`)
	}
	sendJSON(w, status, body)
}

// writeLean is writeJSON for a value that encodes itself.
func writeLean(w http.ResponseWriter, status int, value writable) {
	sendJSON(w, status, value.appendTo(nil))
}

func sendJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(body)
}
