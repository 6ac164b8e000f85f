package main

import (
	"log"
	"net/http"
	"os/exec"
	"syscall"
)

func handleShutdown(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusAccepted, struct{}{})
	go powerOff()
}

// powerOff asks systemd; a machine whose systemd is broken is switched off all the same.
func powerOff() {
	command := exec.Command("/bin/systemctl", "--no-block", "poweroff")
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err := command.Run()
	if err == nil {
		return
	}
	log.Printf("systemctl poweroff failed, powering off directly: %v", err)
	syscall.Sync()
	if err := syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		log.Printf("reboot: %v", err)
	}
}
