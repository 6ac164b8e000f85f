module stead/guest

go 1.27

require golang.org/x/sys v0.45.0
