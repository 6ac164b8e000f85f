module stead/guest

go 1.27
