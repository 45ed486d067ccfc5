"""The larger commands of `vitray`, one file each. Their modules import only click; a command imports what it runs."""
