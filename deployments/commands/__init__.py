"""The larger commands of `vitray`, a file each. Importing one costs no more than click: its run imports the work."""
