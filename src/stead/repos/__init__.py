"""Git hosting: repositories, access, transfer, search, webhooks and maintenance, all with the git program."""
