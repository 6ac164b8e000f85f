"""Search: file contents, file names, commit messages and diffs, with `git grep` and `git log`."""
